"""Inputs and gradients that are quantized tensors of the row format: linears multiply their codes."""

import pytest
import torch
import torch.nn.functional as F
from arrived_rows import ON_DEVICES, ROWS, ROWS_OF_MX, odd_values, values
from helpers import assert_same, round_up
from reference import activations, emulation

import qshard

ops = torch.ops.qshard
BLOCKS, MX = "float8_blockwise[emulate]", "mxfp8[emulate]"
SHAPES = [(1, 16), (37, 300), (128, 128), (200, 144), (300, 1024)]


def matrix(rows, columns, format, device="cpu", dtype=torch.float32, seed=5):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(device, dtype)
    return ops.quantize(weight, format).requires_grad_()


# ---------------------------------------------------------------------------------- the codes


def saved_columns(saved, m, k, dims):
    """codes (K, M to 128), and scale_inv as the GEMM reads it."""
    rows, pitch = round_up(k, 16), round_up(m, 128)
    codes, scales = saved[: rows * pitch].view(rows, pitch), saved[rows * pitch :].view(torch.float32)
    if dims == 2:
        blocks = round_up(pitch // 128, 4)
        return codes, scales[: -(-rows // 128) * blocks].view(-1, blocks)
    return codes, scales[: rows * (pitch // 128)].view(-1, rows)


@ON_DEVICES
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("shape", [(40, 300), (128, 128), (300, 144), (515, 16)])
def test_columns_are_made_of_the_codes_of_rows(shape, dims, device):
    (m, k), x = shape, odd_values(*shape)
    codes, scale_inv = activations.quantize_1x128(x)
    columns, largest = activations.columns_of_1x128(codes, scale_inv)
    weight = matrix(16, k, f"float8_blockwise[x_block_scaling_dim={dims},emulate]", device)
    saved = ops.linear_forward(ops.quantize(x.to(device), ROWS), weight.detach(), None, True)[1].cpu()
    got, scales = saved_columns(saved, m, k, dims)
    assert_same(got[:k, :m], columns.t())
    assert not got[k:].any() and not got[:, m:].any()
    if dims == 2:
        assert_same(scales[:, : -(-m // 128)], largest.t().contiguous())
        assert not scales[:, -(-m // 128) :].any()
    else:
        assert_same(scales[:, :k], largest.repeat_interleave(128, 1)[:, :k])
        assert (scales[:, k:] == 1).all()


def test_columns_of_a_scale_that_is_none():
    """Bytes that no kernel of ours makes: a NaN scale is the largest."""
    q = ops.quantize(values(200, 256), ROWS)
    ops.scale_inv(q).view(torch.uint8)[3, 1] = 255
    assert ops.dequantize(q)[3, 128:].isnan().all() and not ops.dequantize(q)[3, :128].isnan().any()
    weight = matrix(16, 256, BLOCKS)
    saved = ops.linear_forward(q, weight.detach(), None, True)[1]
    _, scales = saved_columns(saved, 200, 256, 2)
    assert scales[1, 0].isnan() and not scales[0].isnan().any()
    assert ops.linear(q, weight.detach())[3].isnan().all()


# -------------------------------------------------------------------------------- the products


def run(x, weight, grad, bias=None):
    weight.grad = None
    x = x.detach().requires_grad_()
    y = F.linear(x, weight, bias)
    y.backward(grad)
    assert not ops.is_quantized(x.grad) and not ops.is_quantized(y)
    assert x.grad.dtype == x.dtype
    return y.detach(), x.grad, weight.grad


@ON_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_values(shape, dtype, device):
    """Forward and dgrad bit for bit; wgrad of the columns that the oracle makes."""
    (m, k), n = shape, 48
    x, grad = values(m, k, dtype).to(device), values(m, n, dtype, seed=1).to(device)
    weight, bias = matrix(n, k, BLOCKS, device, dtype), torch.ones(n, dtype=dtype, device=device)
    expected = run(x, weight, grad, bias)
    arrived, arrived_grad = ops.quantize(x, ROWS), ops.quantize(grad, ROWS)
    for got in (run(arrived, weight, grad, bias), run(arrived, weight, arrived_grad, bias)):
        assert_same(got[0], expected[0])
        assert_same(got[1], expected[1])
    factors = []
    for tensor in (grad, x):
        codes, largest = activations.columns_of_1x128(*activations.quantize_1x128(tensor.cpu()))
        scales = activations.expand_128x128(largest, *codes.shape)
        factors.append(emulation.decoded(codes, torch.float8_e4m3fn) * scales.double())
    exact, sizes = factors[0].t() @ factors[1], factors[0].abs().t() @ factors[1].abs()
    limit = 2 * m * 2.0**-24 * sizes + torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((got[2].cpu().double() - exact).abs() <= limit).all()


@ON_DEVICES
@pytest.mark.parametrize("shape", [(64, 64), (37, 96)])
def test_mxfp8(shape, device):
    (m, k), n = shape, 32
    x, grad = odd_values(m, k).to(device), values(m, n, seed=1).to(device)
    weight = matrix(n, k, MX, device)
    expected = run(x, weight, grad)
    q = ops.quantize(x, ROWS_OF_MX)
    y, x_grad, weight_grad = run(q, weight, ops.quantize(grad, ROWS_OF_MX))
    assert_same(y, expected[0])
    assert_same(x_grad, expected[1])
    values_of = [ops.dequantize(t, dtype=torch.float32) for t in (q, ops.quantize(grad, ROWS_OF_MX))]
    assert_same(weight_grad, run(values_of[0], weight, values_of[1])[2])


@pytest.mark.parametrize("format, rows", [("float8_blockwise", ROWS), ("mxfp8", ROWS_OF_MX)])
def test_without_such_gemms_values_of_the_codes_are_multiplied(format, rows):
    x, grad = values(40, 96), values(40, 64, seed=1)
    weight = matrix(64, 96, format)
    q, g = ops.quantize(x, rows), ops.quantize(grad, rows)
    expected = run(ops.dequantize(q), weight, ops.dequantize(g))
    for got, want in zip(run(q, weight, g), expected):
        assert_same(got, want)


@pytest.mark.parametrize("format", ["float8_tensorwise[emulate]", "float8_delayed[emulate]", MX, "nvfp4[emulate,nearest_gradients]"])
def test_rows_of_another_format_are_quantized_again(format):
    x, grad = values(48, 96), values(48, 64, seed=1)
    weight, q, g = matrix(64, 96, format), ops.quantize(x, ROWS), ops.quantize(grad, ROWS)
    expected = run(ops.dequantize(q), weight, ops.dequantize(g))
    for got, want in zip(run(q, weight, g), expected):
        assert_same(got, want)
    assert "float8_1x128 qshard::linear: dequantized codes" in qshard.ops.backend_report()


def test_nothing_but_codes_is_kept():
    kept = []
    q = ops.quantize(values(64, 256, torch.bfloat16), ROWS).requires_grad_()
    weight = matrix(32, 256, BLOCKS, dtype=torch.bfloat16)
    F.linear(q, weight)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = F.linear(q, weight)
    assert [ops.format(t) for t in kept if ops.is_quantized(t)] == [ROWS]
    assert all(t.numel() <= weight.numel() for t in kept if t is not kept[0])
    y.sum().backward()
    assert q.grad.dtype is torch.bfloat16 and not ops.is_quantized(q.grad)


def read_as_values():
    return [line for line in qshard.ops.backend_report().splitlines() if line.startswith(ROWS)]


@pytest.mark.parametrize("call", ["F.linear", "linear", "mm", "addmm", "matmul", "inference", "3-D", "weight_only"])
def test_callers(call):
    x, bias = values(24, 256), torch.ones(32)
    q, weight = ops.quantize(x, ROWS), matrix(32, 256, BLOCKS)
    calls = {
        "F.linear": lambda x: F.linear(x, weight),
        "linear": lambda x: ops.linear(x, weight),
        "mm": lambda x: torch.mm(x, weight.detach().t()),
        "addmm": lambda x: torch.addmm(bias, x, weight.detach().t()),
        "matmul": lambda x: x @ weight.detach().t(),
        "3-D": lambda x: F.linear(x.view(2, 12, 256), weight),
        "weight_only": lambda x: ops.linear(ops.dequantize(x) if x is q else x, weight, weight_only=True),
    }
    if call == "weight_only":
        return assert_same(ops.linear(q, weight, weight_only=True), calls[call](q))
    with torch.inference_mode(call == "inference"):
        function = calls.get(call, calls["F.linear"])
        before = read_as_values()
        got = function(q)
        assert read_as_values() == before
        assert_same(got, function(x))


def test_a_function_may_hand_on_both():
    """What stands between ranks returns quantized tensors forward, and backward too."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return ops.quantize(x, ROWS)

        @staticmethod
        def backward(ctx, grad):
            assert not ops.is_quantized(grad)
            return grad

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            return ops.quantize(grad, ROWS)

    x, grad = values(64, 256), values(64, 32, seed=1)
    weight = matrix(32, 256, BLOCKS)
    expected = run(ops.quantize(x, ROWS), weight, ops.quantize(grad, ROWS))
    weight.grad, x = None, x.clone().requires_grad_()
    y = Combine.apply(F.linear(Exchange.apply(x), weight))
    y.backward(grad)
    for got, want in zip((y, x.grad, weight.grad), expected):
        assert_same(got, want)
