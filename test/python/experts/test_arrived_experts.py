"""Experts whose tokens, or gradients, arrived in codes: their GEMMs multiply these."""

import pytest
import torch
import torch.nn.functional as F
from arrived_rows import ON_DEVICES, ROW_FORMAT, ROWS, odd_values
from expert_cases import EMPTY, by_linears, ends_of, fill_freed_memory, parts, rows_of, stack_of
from helpers import assert_same, ops

import qshard

OUT, IN = 64, 160
FORMATS = [f"{format}[emulate]" for format in ROW_FORMAT]


def step(x, stack, ends, grad):
    stack.grad, x = None, x.detach().requires_grad_()
    y = ops.grouped_linear(x, stack, ends)
    y.backward(grad)
    return y.detach(), x.grad, stack.grad


@ON_DEVICES
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("format", [*FORMATS, *ROW_FORMAT])
@pytest.mark.pairwise
def test_an_expert_is_a_linear_of_its_own(format, empty, device):
    """That each has columns of its own rows alone, too."""
    if device == "cuda":  # whose emulated GEMMs have the same bits whatever their shape
        format = format.partition("[")[0] + "[emulate]"
    ends = ends_of(5, empty) * 31
    rows = ROW_FORMAT[format.partition("[")[0]]
    ours, theirs = stack_of(5, OUT, IN, format, device)
    x, grad = (rows_of(ends, size, 3, device, torch.float32, seed) for size, seed in ((IN, 1), (OUT, 2)))
    x, grad = ops.quantize(x, rows), ops.quantize(grad, rows)
    expected, expected_grad = by_linears_of_codes(x, theirs, ends, grad)
    fill_freed_memory(x + 0, grad + 0, ours.detach() + 0)
    y, x_grad, weight_grad = step(x, ours, ends.to(device), grad)
    assert_same(y, expected)
    assert_same(x_grad, expected_grad)
    assert_same(weight_grad, torch.zeros_like(ours) if theirs.grad is None else theirs.grad)


def by_linears_of_codes(x, stack, ends, grad):
    """by_linears, which makes plain copies, of rows that stay codes."""
    output = torch.zeros(len(x), grad.shape[1], dtype=x.dtype, device=x.device)
    gradient = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for e, rows in enumerate(parts(ends, len(x))):
        if rows.start == rows.stop:
            continue
        own = x[rows].detach().requires_grad_()
        y = F.linear(own, stack[e])
        y.backward(grad[rows])
        output[rows], gradient[rows] = y.detach(), own.grad
    return output, gradient


@ON_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_dgrad_are_those_of_the_values(dtype, device):
    ends = torch.tensor([3, 3, 140, 300, 301], dtype=torch.int32)
    stack = stack_of(5, OUT, IN, "float8_blockwise[emulate]", device, dtype)[0]
    x, grad = odd_values(310, IN).to(device, dtype), odd_values(310, OUT).to(device, dtype)
    expected, expected_grad = by_linears(x, stack.detach().clone().requires_grad_(), ends, grad)
    for given in (grad, ops.quantize(grad, ROWS)):
        y, x_grad, _ = step(ops.quantize(x, ROWS), stack, ends.to(device), given)
        assert_same(y, expected)
        assert_same(x_grad, expected_grad)


@ON_DEVICES
@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("format", [*FORMATS, "float8_tensorwise", "float8_blockwise"])
def test_an_mlp_is_its_linears(format, joined, device):
    ends = torch.tensor([3, 3, 140, 200], dtype=torch.int32, device=device)
    rows = ROW_FORMAT[format.partition("[")[0]]
    inner = 64
    gates, ups, downs = (
        stack_of(4, *shape, format, device, base=2.0)
        for shape in ((2 * inner if joined else inner, IN), (inner, IN), (OUT, inner))
    )
    x, grad = (
        ops.quantize(rows_of(ends.cpu(), size, 5, device, torch.float32, seed, base=2.0), rows)
        for size, seed in ((IN, 1), (OUT, 2))
    )
    assert_is_composed(zip(gates, ups, downs), joined, x, grad, ends)


def assert_is_composed(weights, joined, x, grad, ends):
    """swiglu_experts gives the values and gradients of its linears. weights: (gate, up, down) for each of both; joined:
    gate has up's rows, too."""
    found = []
    for function, (gate, up, down) in zip((ops.swiglu_experts, composed), weights):
        up = None if joined else up
        own = x.detach().requires_grad_()
        y = function(own, gate, up, down, ends)
        y.backward(grad)
        found.append([y.detach(), own.grad, *(w.grad for w in (gate, up, down) if w is not None)])
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


def composed(x, gate, up, down, offs):
    first = ops.grouped_linear(x, gate, offs)
    halves = first.chunk(2, -1) if up is None else (first, ops.grouped_linear(x, up, offs))
    return ops.grouped_linear(F.silu(halves[0]) * halves[1], down, offs)


def test_grouped_mm():
    ends = torch.tensor([3, 3, 40], dtype=torch.int32)
    stack = stack_of(3, OUT, IN, "float8_blockwise[emulate]")[0]
    q = ops.quantize(odd_values(44, IN), ROWS)
    expected = ops.grouped_linear(q, stack, ends)
    before = read_as_values()
    assert_same(F.grouped_mm(q, stack.mT, offs=ends), expected)
    with torch.inference_mode():
        assert_same(F.grouped_mm(q, stack.mT, offs=ends), expected)
    lying = stack_of(3, IN, OUT, "float8_blockwise[emulate]")[0]
    y = F.grouped_mm(q, lying, offs=ends)
    assert_same(y[3:40], q[3:40] @ lying[2].detach())
    y[:40].sum().backward()
    assert read_as_values() == before and not ops.is_quantized(lying.grad)


def read_as_values():
    return [line for line in qshard.ops.backend_report().splitlines() if line.startswith(ROWS)]


def test_tokens_of_another_format_are_quantized_again():
    ends = torch.tensor([3, 3, 40], dtype=torch.int32)
    q = ops.quantize(odd_values(44, IN), ROWS)
    for format in ("float8_tensorwise_fp32_scale[emulate]", "mxfp8[emulate]"):
        stack = stack_of(3, OUT, IN, format)[0]
        assert_same(ops.grouped_linear(q, stack, ends), ops.grouped_linear(ops.dequantize(q), stack, ends))
    assert f"{ROWS} qshard::grouped_linear: dequantized codes" in qshard.ops.backend_report()


def test_no_tokens():
    stack = stack_of(2, OUT, IN, "float8_blockwise[emulate]")[0]
    q = ops.quantize(torch.empty(0, IN), ROWS)
    y, x_grad, weight_grad = step(q, stack, torch.zeros(2, dtype=torch.int32), ops.quantize(torch.empty(0, OUT), ROWS))
    assert y.shape == (0, OUT) and x_grad.shape == (0, IN) and not weight_grad.any()
