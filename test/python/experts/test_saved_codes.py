"""What autograd keeps of the inputs of experts on Hopper: the codes that wgrad reads, where they take less memory."""

import pytest
import torch
from expert_cases import rows_of, stack_of
from helpers import are_codes_of, assert_same, ops
from test_grouped_linear_cuda import ON_CODES, on_hopper

pytestmark = on_hopper
OUT, IN = 208, 400
MANY = torch.tensor([600, 600, 1250, 2000], dtype=torch.int32)  # rows for which codes are kept
FEW = torch.tensor([40, 90, 100, 130], dtype=torch.int32)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kept_by(call, *weights):
    """The result, and each tensor that autograd keeps of it, but for what it keeps of weights."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        result = call()
    return result, [t for t in kept if not ops.is_quantized(t) and not are_codes_of(t, *weights)]


def gradients(stack, x, grad, ends):
    stack.grad = None
    y = ops.grouped_linear(x, stack, ends.cuda())
    y.backward(grad)
    return y.detach(), stack.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ON_CODES)
def test_kept_codes_give_the_bits_of_kept_values(format, dtype):
    kept, values = stack_of(4, OUT, IN, format, "cuda")
    x, grad = (rows_of(MANY, size, 9, "cuda", dtype, 1) for size in (IN, OUT))
    grad[-9:] = 1.0
    expected = gradients(values, x, grad, MANY)  # an input without a gradient stays as it is
    inputs = x.clone().requires_grad_()
    for found, value in zip(gradients(kept, inputs, grad, MANY), expected, strict=True):
        assert_same(found, value)
    assert not inputs.grad[-9:].any()
    if "delayed" in format:
        assert_same(ops._state(kept)["amax_history"], ops._state(values)["amax_history"])


@pytest.mark.parametrize("format", ON_CODES)
def test_codes_are_kept_where_they_take_less_memory(format):
    stack = stack_of(4, OUT, IN, format, "cuda")[0]
    for ends, requires_grad, saves in ((MANY, True, True), (MANY, False, False), (FEW, True, False)):
        x = rows_of(ends, IN, 0, "cuda", torch.bfloat16, 1).requires_grad_(requires_grad)
        _, kept = kept_by(lambda x=x, ends=ends: ops.grouped_linear(x, stack, ends.cuda()), stack)
        codes = [t for t in kept if t.dtype == torch.uint8]
        assert bool(codes) == saves and any(t is x for t in kept) != saves
        assert all(t.nbytes <= x.nbytes * 3 / 4 for t in codes)
    frozen = stack.detach()
    _, kept = kept_by(lambda: ops.grouped_linear(x, frozen, FEW.cuda()), frozen)
    assert not [t for t in kept if t.dtype == torch.uint8]


@pytest.mark.parametrize("format", ON_CODES)
def test_gate_and_up_keep_the_codes_of_their_input_once(format):
    gate, up = (stack_of(4, 256, IN, format, "cuda")[0] for _ in "ab")
    down = stack_of(4, IN, 256, format, "cuda")[0]
    x = rows_of(MANY, IN, 5, "cuda", torch.bfloat16, 1).requires_grad_()
    y, kept = kept_by(lambda: ops.swiglu_experts(x, gate, up, down, MANY.cuda()), gate, up, down)
    codes = {t.data_ptr() for t in kept if t.dtype == torch.uint8}  # of the product, too
    assert len(codes) == (3 if "delayed" in format else 2) and not any(t is x for t in kept)
    grad = rows_of(MANY, IN, 5, "cuda", torch.bfloat16, 2)
    grad[-5:] = 0
    y.backward(grad)
    found = [x.grad, gate.grad, up.grad, down.grad]
    for p in (x, gate, up, down):
        p.grad = None
    values = [ops.grouped_linear(x, w, MANY.cuda()) for w in (gate, up)]
    product = torch.nn.functional.silu(values[0]) * values[1]
    other = ops.grouped_linear(product, down, MANY.cuda())
    assert_same(y.detach(), other.detach())
    other.backward(grad)
    for one, p in zip(found[1:], (gate, up, down), strict=True):
        torch.testing.assert_close(one, p.grad, rtol=1e-2, atol=1e-2 * float(p.grad.abs().max()))


@pytest.mark.parametrize("format", ON_CODES)
def test_hooks_on_saved_tensors_may_move_codes(format):
    stack, other = stack_of(4, OUT, IN, format, "cuda")
    x, grad = (rows_of(MANY, size, 9, "cuda", torch.bfloat16, 1) for size in (IN, OUT))
    expected = gradients(other, x.clone().requires_grad_(), grad, MANY)
    with torch.autograd.graph.save_on_cpu():
        found = gradients(stack, x.clone().requires_grad_(), grad, MANY)
    for one, value in zip(found, expected, strict=True):
        assert_same(one, value)


def test_a_graph_is_replayed_with_other_ends():
    stack = stack_of(4, 256, 384, "float8_blockwise", "cuda", torch.bfloat16)[0]
    x = torch.randn(2000, 384, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(2000, 256, device="cuda", dtype=torch.bfloat16)
    offs = MANY.cuda()

    def step():
        stack.grad = x.grad = None
        ops.grouped_linear(x, stack, offs).backward(grad)

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replayed = stack.grad, x.grad
    for ends in ([0, 7, 1999, 2000], [500, 1000, 1500, 1900], [0, 0, 0, 0]):
        offs.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        step()
        assert_same(replayed[0], stack.grad)
        assert_same(replayed[1], x.grad)
