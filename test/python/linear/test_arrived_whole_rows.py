"""Inputs and gradients in rows with one scale each (float8_1xK): linears with one scale, or one for each row of the
weight, multiply their codes."""

import pytest
import torch
import torch.nn.functional as F
from arrived_rows import ON_DEVICES, WHOLE_ROWS, bits, needs_gpu, odd_values, values
from helpers import assert_same, ops, round_up
from reference import activations, emulation
from reference.formats import FORMATS
from test_arrived_rows import SHAPES, matrix, run

import qshard

TENSOR, ROWWISE = "float8_tensorwise", "float8_rowwise"
BOTH = pytest.mark.parametrize("format", [TENSOR, ROWWISE])
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of Hopper"
)


def emulated(format):
    return f"{format}[emulate]"


# ---------------------------------------------------------------------------------- the codes


@ON_DEVICES
@BOTH
@pytest.mark.parametrize("shape", [(40, 300), (128, 128), (300, 144), (515, 16), (130, 1100)])
def test_columns_are_made_of_the_codes_of_rows(shape, format, device):
    (m, k), x = shape, odd_values(*shape)
    x[8:10] = 0  # else most other rows have no code but 0
    columns, largest = activations.columns_of_rows(*activations.quantize_rowwise(x))
    weight = matrix(16, k, emulated(format), device).detach()
    saved = ops.linear_forward(ops.quantize(x.to(device), WHOLE_ROWS), weight, None, True)[1].cpu()
    codes, scales = split(saved, m, k)
    assert_same(codes[:k, :m], columns.t())
    assert not codes[k:].any() and not codes[:, m:].any()
    assert_same(scales[: len(codes) if format == ROWWISE else 1].unique(), largest.view(1))
    if device == "cuda":
        weight = matrix(16, k, format, device).detach()
        other = ops.linear_forward(ops.quantize(x.to(device), WHOLE_ROWS), weight, None, True)[1]
        found, of_gpu = split(other.cpu(), m, k)
        assert_same(found, codes)
        assert_same(of_gpu[:1], scales[:1])


def split(saved, m, k):
    """codes (K to 16, M to 128), and what follows them."""
    rows, pitch = round_up(k, 16), round_up(m, 128)
    return saved[: rows * pitch].view(rows, pitch), saved[rows * pitch :].view(torch.float32)


@ON_DEVICES
def test_scales_of_columns(device):
    """Zeros do not count, whatever their scale; a NaN scale is the largest."""
    weight = matrix(16, 512, emulated(TENSOR), device).detach()

    def largest(q):
        return split(ops.linear_forward(q, weight, None, True)[1].cpu(), len(q), 512)[1][0]

    x = torch.zeros(200, 512)
    x[3, 500], x[140, 1] = 2.0**-20, 2.0**-21
    q = ops.quantize(x.to(device), WHOLE_ROWS)
    assert largest(q) == 2.0**-28 and largest(ops.quantize(0 * x.to(device), WHOLE_ROWS)) == 1
    ops.scale_inv(q).view(torch.uint8)[7] = 254
    assert largest(q) == 2.0**-28
    ops.scale_inv(q).view(torch.uint8)[3] = 255
    assert largest(q).isnan() and ops.dequantize(q)[3].isnan().all() and not ops.dequantize(q)[140].isnan().any()
    assert ops.linear(q, weight)[3].isnan().all() and not ops.linear(q, weight)[140].isnan().any()


def parts_of_rows(packed, format):
    """Codes and scales of 208 rows of 304: NaNs have either sign, and bytes behind stay unwritten."""
    scales = 208 if format == "float8_rowwise" else 1
    codes, scales = packed[: 208 * 304], packed[208 * 304 :][: 4 * scales]
    return codes.view(torch.float8_e4m3fn).float(), scales.view(torch.float32)


@ON_DEVICES
@BOTH
def test_quantize_input_packs_them(format, device):
    """Rows as those of the values; columns as linears make them."""
    x = odd_values(200, 300).to(device)
    q, name = ops.quantize(x, WHOLE_ROWS), emulated(format)
    rows, columns = ops.quantize_input(q, name, True, True)
    expected = ops.quantize_input(ops.dequantize(q), name, True, False)[0]
    for one, other in zip(parts_of_rows(rows, format), parts_of_rows(expected, format)):
        assert_same(one, other)
    saved = ops.linear_forward(q, matrix(16, 300, name, device).detach(), None, True)[1]
    assert_same(columns[: 304 * 256 + 4], saved[: 304 * 256 + 4])
    assert_same(ops.quantize_input(q, name, False, True)[1][: 304 * 256 + 4], saved[: 304 * 256 + 4])


# -------------------------------------------------------------------------------- the products


def decoded(codes, dtype=torch.float8_e4m3fn):
    return codes.contiguous().view(dtype).float()


def rows_of(x):
    codes, scale_inv = activations.quantize_rowwise(x)
    return decoded(codes), scale_inv[:, None]


def columns_of(x):
    codes, scale_inv = activations.columns_of_rows(*activations.quantize_rowwise(x))
    return decoded(codes).t(), scale_inv


def plain_columns_of(x, format, is_gradient):
    """Those of values that did not arrive."""
    dtype = FORMATS[format].grad_dtype if is_gradient else torch.float8_e4m3fn
    quantize = activations.quantize_rowwise if format == ROWWISE else activations.quantize_tensorwise
    codes, scale_inv = quantize(x.t().contiguous(), dtype)
    return decoded(codes, dtype), scale_inv[:, None] if format == ROWWISE else scale_inv


def factors(x, weight, grad, format, arrived, arrived_grad):
    """(a, scales of a, b, scales of b) for forward, dgrad and wgrad, whose product is a @ b^T."""
    w, of_weight = decoded(bits(ops.codes(weight)).cpu()), ops.scale_inv(weight).detach().cpu()
    of_rows = of_weight.view(-1) if format == ROWWISE else of_weight.view(1)
    folded = grad.float() * of_rows if format == ROWWISE else grad
    if arrived_grad:
        codes, scale_inv = activations.quantize_rowwise(grad)
        value = decoded(codes) * scale_inv[:, None]
        folded = rows_of(value * of_rows) if format == ROWWISE else (decoded(codes), scale_inv[:, None])
    elif format == ROWWISE:
        folded = rows_of(folded)
    else:
        codes, scale_inv = activations.quantize_tensorwise(grad, torch.float8_e5m2)
        folded = decoded(codes, torch.float8_e5m2), scale_inv
    one = torch.ones(1)
    return (
        (*rows_of(x), w, of_rows),
        (*folded, w.t(), one if format == ROWWISE else of_rows),
        (
            *(columns_of(grad) if arrived_grad else plain_columns_of(grad, format, True)),
            *(columns_of(x) if arrived else plain_columns_of(x, format, False)),
        ),
    )


def product(a, scale_a, b, scale_b):
    return torch.mm(a, b.t()).mul_(scale_a).mul_(scale_b.view(-1))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arrived, arrived_grad", [(True, True), (True, False), (False, True)])
@pytest.mark.pairwise
def test_products_of_codes_in_fp32_times_scales(arrived, arrived_grad, shape, dtype, format):
    (m, k), n = shape, 48
    x, grad = values(m, k, dtype), values(m, n, dtype, seed=1)
    weight = matrix(n, k, emulated(format), dtype=dtype)
    forward, dgrad, wgrad = factors(x, weight, grad, format, arrived, arrived_grad)
    given = ops.quantize(x, WHOLE_ROWS) if arrived else x
    bias = torch.ones(n, dtype=dtype)
    y, x_grad, weight_grad = run(given, weight, ops.quantize(grad, WHOLE_ROWS) if arrived_grad else grad, bias)
    if arrived:
        assert_same(y, product(*forward).add_(bias).to(dtype))
    assert_same(x_grad, product(*dgrad).to(dtype))
    assert_same(weight_grad, product(*wgrad).to(dtype))


@needs_gpu
@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_emulates_what_the_cpu_does(shape, format):
    """Sums are those of fp64, and differ from the CPU's by the order of sums alone."""
    (m, k), n = shape, 48
    x, grad = values(m, k), values(m, n, seed=1)
    weight = matrix(n, k, emulated(format), "cuda")
    got = run(ops.quantize(x.cuda(), WHOLE_ROWS), weight, ops.quantize(grad.cuda(), WHOLE_ROWS))
    for found, (a, scale_a, b, scale_b) in zip(got, factors(x, weight, grad, format, True, True)):
        a, b = a.double() * scale_a, b.double() * scale_b.view(-1, 1)
        limit = 2 * a.shape[1] * 2.0**-24 * (a.abs() @ b.abs().t())
        assert ((found.cpu().double() - a @ b.t()).abs() <= limit).all()


@on_hopper
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(37, 304), (128, 128), (300, 1040)])
def test_hopper_has_the_bits_of_the_cpu(shape, dtype, format):
    """Numbers of which tensor cores keep all bits in any order."""
    (m, k), n = shape, 64
    generator = torch.Generator().manual_seed(m)
    x, grad, weight = (torch.randint(-1, 2, size, generator=generator).float() for size in ((m, k), (m, n), (n, k)))
    x, grad = (t * 2.0 ** torch.randint(-1, 1 + i, (m, 1), generator=generator) for i, t in enumerate((x, grad), 1))
    x[5] = 0
    found = []
    for device, name in (("cpu", emulated(format)), ("cuda", format)):
        stack = ops.quantize(weight.to(device, dtype), name).requires_grad_()
        given = [ops.quantize(t.to(device, dtype), WHOLE_ROWS) for t in (x, grad)]
        found.append([t.cpu() for t in run(given[0], stack, given[1])])
    for one, other in zip(*found):
        assert_same(one, other)
    assert f"{WHOLE_ROWS} qshard::linear: dequantized" not in qshard.ops.backend_report()


@ON_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_of_a_weight_with_scales_of_rows_has_the_bits_of_the_values(dtype, device):
    x, grad = odd_values(200, 304).to(device, dtype), values(200, 48, dtype, seed=1).to(device)
    weight = matrix(48, 304, emulated(ROWWISE), device, dtype)
    expected = run(x, weight, grad)
    y, x_grad, _ = run(ops.quantize(x, WHOLE_ROWS), weight, grad)
    assert_same(y, expected[0])
    assert_same(x_grad, expected[1])


@pytest.mark.parametrize(
    "format", [TENSOR, ROWWISE, "float8_tensorwise_fp32_scale[emulate]", "float8_delayed[emulate]"]
)
def test_values_are_multiplied_where_no_gemm_reads_such_rows(format):
    x, grad = values(40, 96), values(40, 64, seed=1)
    weight, again = matrix(64, 96, format), matrix(64, 96, format)
    q, g = ops.quantize(x, WHOLE_ROWS), ops.quantize(grad, WHOLE_ROWS)
    expected = run(ops.dequantize(q), again, ops.dequantize(g))
    for got, want in zip(run(q, weight, g), expected):
        assert_same(got, want)


@BOTH
def test_callers(format):
    """All of them read codes."""
    x, bias = values(24, 256), torch.ones(32)
    q, weight = ops.quantize(x, WHOLE_ROWS), matrix(32, 256, emulated(format))
    expected = ops.linear(q, weight.detach())
    before = read_as_values()
    assert_same(F.linear(q, weight), expected)
    assert_same(torch.mm(q, weight.detach().t()), expected)
    assert_same(torch.addmm(bias, q, weight.detach().t()), expected + bias)
    assert_same(F.linear(q.view(2, 12, 256), weight), expected.view(2, 12, 32))
    with torch.inference_mode():
        assert_same(F.linear(q, weight), expected)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.linear(q.detach().requires_grad_(), weight)
    assert [ops.format(t) for t in kept if ops.is_quantized(t)] == [WHOLE_ROWS]
    assert read_as_values() == before


def read_as_values():
    return [line for line in qshard.ops.backend_report().splitlines() if line.startswith(WHOLE_ROWS)]
