"""The MLPs of experts: `swiglu_experts` is grouped_linear, silu and mul, bit for bit, and keeps less."""

import pytest
import torch
import torch.nn.functional as F
from expert_cases import EMPTY, NAN, ends_of, fill_freed_memory, rows_of, stack_of
from helpers import FORMATS, assert_same, ops
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

COLUMNS, INNER, OUTPUTS = 64, 32, 96
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
WAYS = pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])


def weights_of(count, format, joined, device="cpu", dtype=torch.float32, trained="gud"):
    """gate, up (None if joined) and down, twice."""
    shapes = {"g": (2 * INNER if joined else INNER, COLUMNS), "u": (INNER, COLUMNS), "d": (OUTPUTS, INNER)}
    pairs = [stack_of(count, *shape, format, device, dtype, base=2.0) for shape in shapes.values()]
    for name, pair in zip(shapes, pairs):
        for stack in pair:
            stack.requires_grad_(name in trained)
    if joined:
        pairs[1] = [None, None]
    return list(zip(*pairs))


def composed(x, gate, up, down, offs, **kwargs):
    first = ops.grouped_linear(x, gate, offs, **kwargs)
    halves = first.chunk(2, -1) if up is None else (first, ops.grouped_linear(x, up, offs, **kwargs))
    return ops.grouped_linear(F.silu(halves[0]) * halves[1], down, offs, **kwargs)


def step(function, x, weights, offs, grad, **kwargs):
    x = x.clone().requires_grad_()
    torch.manual_seed(0)  # some formats round gradients stochastically
    y = function(x, *weights, offs, **kwargs)
    y.backward(grad)
    return [y.detach(), x.grad, *(w.grad for w in weights if w is not None)]


def assert_steps_are_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("count", [1, 3, 8])
@WAYS
@pytest.mark.parametrize("format", FORMATS)
def test_it_is_the_linears_one_after_the_other(format, joined, count, empty, dtype, device):
    ends = ends_of(count, empty)
    ours, theirs = weights_of(count, format, joined, device)
    x = rows_of(ends, COLUMNS, 3, device, dtype, 1, base=2.0)
    grad = rows_of(ends, OUTPUTS, 3, device, dtype, 2, base=2.0)
    offs = ends.to(device)
    expected = step(composed, x, theirs, offs, grad)
    fill_freed_memory(grad, x)
    assert_steps_are_equal(step(ops.swiglu_experts, x, ours, offs, grad), expected)


@WAYS
@pytest.mark.parametrize("trained", ["", "g", "u", "d", "gd"])
def test_gradients_that_are_asked_for(joined, trained):
    if joined and trained == "u":
        trained = "g"
    ends = ends_of(4, "middle")
    grad = rows_of(ends, OUTPUTS, 2, "cpu", torch.float32, 2)
    x = rows_of(ends, COLUMNS, 2, "cpu", torch.float32, 1)
    for needs_input in (False, True):
        found = []
        for function, weights in zip((ops.swiglu_experts, composed), weights_of(4, "mxfp8", joined, trained=trained)):
            own = x.clone().requires_grad_(needs_input)
            y = function(own, *weights, ends)
            assert y.requires_grad == (needs_input or bool(trained))
            if y.requires_grad:
                y.backward(grad)
            found.append([y.detach(), own.grad, *(w.grad for w in weights if w is not None)])
        for one, other in zip(*found):
            assert (one is None) == (other is None)
            if one is not None:
                assert_same(one, other)


def test_gradients_are_added_in_place():
    ends = ends_of(4, "middle")
    ours, theirs = weights_of(4, "float8_blockwise", False)
    x = rows_of(ends, COLUMNS, 0, "cpu", torch.float32, 1)
    grad = rows_of(ends, OUTPUTS, 0, "cpu", torch.float32, 2)
    for _ in range(2):
        step(ops.swiglu_experts, x, ours, ends, grad)
        step(composed, x, theirs, ends, grad)
    for one, other in zip(ours, theirs):
        assert_same(one.grad, other.grad)


@WAYS
def test_it_keeps_the_input_and_two_results(joined):
    """Autograd keeps silu(gate) and the product, too, where bfloat16 experts run one after the other."""
    ends = ends_of(3, "none")
    weights = weights_of(3, "float8_blockwise", joined)[0]
    x = rows_of(ends, COLUMNS, 0, "cpu", torch.float32, 1).requires_grad_()
    kept = {}

    def note(tensor):
        if not ops.is_quantized(tensor) and tensor.dtype == torch.float32 and tensor.dim() == 2:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    planes = [plane(w.detach()) for w in weights if w is not None for plane in (ops.codes, ops.scale_inv)]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ops.swiglu_experts(x, *weights, ends)
    for plane in planes:
        kept.pop(plane.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) == 4 * len(x) * (COLUMNS + 2 * INNER)


@WAYS
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled(joined, backend):
    ends = ends_of(3, "middle")
    formats = dict.fromkeys(("format", "down_format"), "float8_blockwise")
    x = rows_of(ends, COLUMNS, 2, "cpu", torch.float32, 1)
    grad = rows_of(ends, OUTPUTS, 2, "cpu", torch.float32, 2)
    ours, theirs = weights_of(3, "float8_blockwise", joined)

    def run(*args):
        return ops.swiglu_experts(*args, **formats).square()

    expected = step(run, x, theirs, ends, grad)
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    assert_steps_are_equal(step(compiled, x, ours, ends, grad), expected)


def test_checkpointed():
    ends = ends_of(3, "middle")
    x = rows_of(ends, COLUMNS, 2, "cpu", torch.float32, 1)
    grad = rows_of(ends, OUTPUTS, 2, "cpu", torch.float32, 2)
    ours, theirs = weights_of(3, "float8_blockwise", False)
    again = lambda *args: checkpoint(ops.swiglu_experts, *args, use_reentrant=False)  # noqa: E731
    assert_steps_are_equal(
        step(again, x, ours, ends, grad), step(ops.swiglu_experts, x, theirs, ends, grad)
    )


def test_weight_only_and_autocast():
    ends = ends_of(3, "none")
    x = rows_of(ends, COLUMNS, 0, "cpu", torch.float32, 1)
    ours, theirs = weights_of(3, "nvfp4", True)
    y = ops.swiglu_experts(x, *ours, ends, weight_only=True)
    assert_same(y, composed(x, *theirs, ends, weight_only=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.swiglu_experts(x, *ours, ends)
    assert_same(y, ops.swiglu_experts(x.bfloat16(), *ours, ends))


def test_plain_weights_of_a_format():
    ends = ends_of(3, "none")
    x = rows_of(ends, COLUMNS, 0, "cpu", torch.float32, 1)
    plain = [torch.randn(3, *shape) for shape in ((2 * INNER, COLUMNS), (OUTPUTS, INNER))]
    formats = {"format": "mxfp8", "down_format": "float8_blockwise"}
    quantized = [ops.quantize(w, f) for w, f in zip(plain, formats.values())]
    y = ops.swiglu_experts(x, plain[0], None, plain[1], ends, **formats)
    assert_same(y, ops.swiglu_experts(x, quantized[0], None, quantized[1], ends))
    with pytest.raises(RuntimeError, match="name the formats of plain weights"):
        ops.swiglu_experts(x.requires_grad_(), plain[0], None, plain[1], ends)


def test_flops():
    ends = ends_of(3, "none")
    weights = weights_of(3, "float8_blockwise", False)[0]
    x = rows_of(ends, COLUMNS, 0, "cpu", torch.float32, 1).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        ops.swiglu_experts(x, *weights, ends).sum().backward()
    one_way = 2 * len(x) * INNER * (2 * COLUMNS + OUTPUTS)
    assert counter.get_total_flops() == 3 * one_way


def test_rows_of_no_expert_give_zeros():
    weights = weights_of(2, "float8_tensorwise", True)[0]
    x = torch.full((4, COLUMNS), NAN, requires_grad=True)
    y = ops.swiglu_experts(x, *weights, torch.zeros(2, dtype=torch.int32))
    y.backward(torch.full_like(y, NAN))
    assert not y.any() and not x.grad.any()
    assert not weights[0].grad.any() and not weights[2].grad.any()


X, OFFS = torch.randn(6, COLUMNS), torch.tensor([2, 6], dtype=torch.int32)


@pytest.mark.parametrize("what", ["columns", "up", "down", "offs", "dtype of offs", "formats"])
def test_errors(what):
    gate, up, down = (w.detach() for w in weights_of(2, "float8_tensorwise", False)[0])
    other = ops.quantize(torch.randn(2, INNER, COLUMNS), "mxfp8")
    calls = {
        "columns": (X[:, :-1], gate, up, down, OFFS),
        "up": (X, gate, up[:1], down, OFFS),
        "down": (X, gate, up, down.mT, OFFS),
        "offs": (X, gate, up, down, OFFS[:1]),
        "dtype of offs": (X, gate, up, down, OFFS.long()),
        "formats": (X.clone().requires_grad_(), gate, other, down, OFFS),
    }
    message = "quantize both by one recipe" if what == "formats" else "do not go together"
    with pytest.raises(RuntimeError, match=message):
        ops.swiglu_experts(*calls[what])
