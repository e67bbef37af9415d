"""What autograd keeps of the inputs of experts on Hopper: the codes that wgrad reads, where they take less memory."""

import pytest
import torch
from expert_cases import rows_of, stack_of
from helpers import are_codes_of, assert_same, ops
from test_grouped_linear_cuda import ON_CODES, on_hopper

from qshard._runtime.classes import TensorState

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
        histories = [TensorState(stack).scaling_state()["amax_history"] for stack in (kept, values)]
        assert_same(*histories)


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


def mlp_of(format, inner, joined, dtype=torch.float32):
    """Stacks of gate, up (None: joined) and down."""
    gate, up = (stack_of(4, inner * (1 + joined), IN, format, "cuda", dtype)[0] for _ in "ab")
    return gate, None if joined else up, stack_of(4, IN, inner, format, "cuda", dtype)[0]


def composed(x, gate, up, down, offs):
    """swiglu_experts, by operators that pass values."""
    values = ops.grouped_linear(x, gate, offs)
    halves = values.chunk(2, -1) if up is None else (values, ops.grouped_linear(x, up, offs))
    return ops.grouped_linear(torch.nn.functional.silu(halves[0]) * halves[1], down, offs)


def step(function, x, weights, ends, grad):
    x = x.detach().requires_grad_()
    y = function(x, *weights, ends.cuda())
    return y.detach(), *torch.autograd.grad(y, [x, *(w for w in weights if w is not None)], grad)


# silu of torch may be built with another exp: a code may be the next one.
def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.isfinite().all()
        error = (one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30)
        assert error < 2e-3, error


@pytest.mark.parametrize("ends", [MANY, FEW, torch.tensor([0, 0, 300, 300], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("joined, inner", [(False, 256), (False, 208), (True, 256), (True, 208)])
@pytest.mark.parametrize("format", ON_CODES)
def test_mlps_in_codes_are_those_in_values(format, joined, inner, dtype, ends):
    weights = mlp_of(format, inner, joined)
    x, grad = (rows_of(ends, IN, 9, "cuda", dtype, seed, base=1.0) for seed in (1, 2))
    found = step(ops.swiglu_experts, x, weights, ends, grad)
    assert not found[0][-9:].any() and not found[1][-9:].any()
    grad[-9:] = x[-9:] = 0  # of NaNs autograd's formulas make NaNs
    assert_near(found, step(composed, x, weights, ends, grad))
    for one, again in zip(found, step(ops.swiglu_experts, x, weights, ends, grad), strict=True):
        assert_same(one, again)


@pytest.mark.parametrize("trained", ["x", "gate", "up", "down", "x and down"])
def test_some_gradients_of_mlps_in_codes(trained):
    weights = mlp_of("float8_blockwise", 256, joined=False)
    x, grad = (rows_of(MANY, IN, 0, "cuda", torch.bfloat16, seed, base=1.0) for seed in (1, 2))
    all_of = dict(zip(("y", "x", "gate", "up", "down"), step(ops.swiglu_experts, x, weights, MANY, grad), strict=True))
    names = trained.split(" and ")
    tensors = dict(zip(("x", "gate", "up", "down"), (x, *weights), strict=True))
    for name, tensor in tensors.items():
        tensors[name] = tensor.detach().requires_grad_(name in names)
    y = ops.swiglu_experts(*tensors.values(), MANY.cuda())
    found = torch.autograd.grad(y, [tensors[name] for name in names], grad)
    assert_near([y.detach(), *found], [all_of[name] for name in ("y", *names)])


@pytest.mark.parametrize("format", ON_CODES)
def test_gate_and_up_keep_the_codes_of_their_input_once(format):
    weights = mlp_of(format, 256, joined=False)
    x = rows_of(MANY, IN, 5, "cuda", torch.bfloat16, 1).requires_grad_()
    _, kept = kept_by(lambda: ops.swiglu_experts(x, *weights, MANY.cuda()), *weights)
    codes = {t.data_ptr() for t in kept if t.dtype == torch.uint8}
    # In blocks backward makes the product's codes beside the gradients' ones; else they are kept.
    expected = 1 if "blockwise" in format else 3 if "delayed" in format else 2
    assert len(codes) == expected and not any(t is x for t in kept)


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
