"""The linears of experts, `grouped_linear` and `F.grouped_mm`: each expert is a linear of its own."""

import pytest
import torch
import torch.nn.functional as F
from expert_cases import EMPTY, NAN, by_linears, ends_of, fill_freed_memory, parts, rows_of, stack_of
from helpers import FORMATS, assert_same, ops
from torch.utils.flop_counter import FlopCounterMode

import qshard
from qshard._runtime.classes import TensorState
from qshard.formats import info_of

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
OUT, IN = 64, 48
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of_device(format, device):
    """On a GPU what is emulated, whose GEMMs have the same bits whatever their shape."""
    return format if device == "cpu" else format.partition("[")[0] + "[emulate]"


def check(format, count, empty, dtype, device, tail=3, transposed=False):
    format = of_device(format, device)
    ends = ends_of(count, empty)
    shape = (IN, OUT) if transposed else (OUT, IN)
    ours, theirs = stack_of(count, *shape, format, device)
    x = rows_of(ends, IN, tail, device, dtype, 1).requires_grad_()
    grad = rows_of(ends, OUT, tail, device, dtype, 2)
    product = torch.matmul if transposed else F.linear
    torch.manual_seed(0)  # gradients that are rounded stochastically draw in one order
    expected, expected_grad = by_linears(x.detach(), theirs, ends, grad, product)
    fill_freed_memory(grad, x, ours.detach() + 0)
    weight = ours.mT if transposed else ours
    y = ops.grouped_linear(x, weight, ends.to(device))
    assert_same(y, expected)
    torch.manual_seed(0)
    y.backward(grad)
    assert_same(x.grad, expected_grad)
    total = torch.zeros_like(ours.grad) if theirs.grad is None else theirs.grad
    assert_same(ours.grad, total)
    for e, rows in enumerate(parts(ends)):
        if rows.start == rows.stop:
            assert not ours.grad[e].any()
    if "delayed" in format:
        histories = [TensorState(stack).scaling_state()["amax_history"] for stack in (ours, theirs)]
        assert_same(*histories)


def rounds_stochastically(format, count, device):
    """Whether emulated experts draw other words than linears one after the other do."""
    info = info_of(of_device(format, device))
    return info.emulated and info.activations.stochastic_gradients and count > 1


@pytest.mark.pairwise
@pytest.mark.only_where(lambda format, count, device: not rounds_stochastically(format, count, device))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 64, 256])
@pytest.mark.parametrize("format", FORMATS)
def test_an_expert_is_a_linear_of_its_own(format, count, empty, dtype, device):
    check(format, count, empty, dtype, device)


# Matrices of mxfp8_1x32 in a stack have a multiple of 32 rows, which IN is not.
@pytest.mark.pairwise
# Forward rounds stochastically, as dgrad of a linear does, before `check` seeds the generator.
@pytest.mark.only_where(lambda format, device: not rounds_stochastically(format, 2, device))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("format", [format for format in FORMATS if format != "mxfp8_1x32"])
def test_experts_in_out(format, count, empty, device):
    check(format, count, empty, torch.float32, device, transposed=True)


@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_rowwise", "float8_blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("lies", ["out, in", "in, out"])
# nvfp4's forward in dgrad's orientation rounds stochastically, before `check` seeds the generator.
@pytest.mark.only_where(lambda format, lies: (format, lies) != ("nvfp4", "in, out"))
def test_emulated_experts_on_cpu(format, lies):
    format = f"{format}[emulate]"
    count = 1 if rounds_stochastically(format, 5, "cpu") else 5
    check(format, count, "none" if count == 1 else "middle", torch.float32, "cpu", transposed=lies == "in, out")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lies", ["out, in", "in, out"])
def test_stochastic_rounding_of_an_expert_is_its_own(lies, device):
    """The words that round a gradient are drawn once a call; where it lies in its expert says which it takes."""
    shape = (OUT, IN) if lies == "out, in" else (IN, OUT)
    stack = stack_of(4, *shape, "nvfp4[emulate]", device)[0]
    ends = torch.tensor([70, 70, 83, 200], dtype=torch.int32)
    x = rows_of(ends, IN, 3, device, torch.float32, 1)
    grad = rows_of(ends, OUT, 3, device, torch.float32, 2)

    def run(x, grad, ends):
        stack.grad, x = None, x.detach().requires_grad_()
        torch.manual_seed(7)
        y = ops.grouped_linear(x, stack if lies == "out, in" else stack.mT, ends.to(device))
        y.backward(grad)
        return y.detach(), x.grad, stack.grad

    y, x_grad, weight_grad = run(x, grad, ends)
    for e, rows in enumerate(parts(ends)):
        alone = torch.zeros(4, dtype=torch.int32)
        alone[e:] = rows.stop - rows.start
        own = run(x[rows], grad[rows], alone)
        for found, expected in zip(own, (y[rows], x_grad[rows], weight_grad), strict=True):
            assert_same(found if found.dim() == 2 else found[e], expected if expected.dim() == 2 else expected[e])


def test_calls_and_experts_round_by_words_of_their_own():
    stack = ops.quantize(torch.randn(1, OUT, IN).expand(2, OUT, IN).contiguous(), "nvfp4[emulate]")
    x = torch.randn(70, IN).repeat(2, 1).requires_grad_()
    grad, offs = torch.randn(70, OUT).repeat(2, 1), torch.tensor([70, 140], dtype=torch.int32)
    found = [torch.autograd.grad(ops.grouped_linear(x, stack, offs), x, grad)[0] for _ in range(2)]
    assert (found[0][:70] != found[0][70:]).any() and (found[0] != found[1]).any()


@pytest.mark.parametrize("format", ["float8_tensorwise", "mxfp8"])
@pytest.mark.parametrize("lies", ["out, in", "in, out"])
def test_grouped_mm(format, lies):
    ends = ends_of(4, "middle")
    shape = (OUT, IN) if lies == "out, in" else (IN, OUT)
    ours, theirs = stack_of(4, *shape, format)
    x = rows_of(ends, IN, 2, "cpu", torch.float32, 1)
    xs = [x.clone().requires_grad_() for _ in "ab"]
    grad = rows_of(ends, OUT, 2, "cpu", torch.float32, 2)
    as_linear, as_product = (ours, ours.mT) if lies == "out, in" else (ours.mT, ours)
    expected = ops.grouped_linear(xs[0], as_linear, ends)
    with torch.no_grad():
        assert_same(F.grouped_mm(x, as_product, offs=ends), expected)
    with torch.inference_mode():
        assert_same(F.grouped_mm(x, as_product, offs=ends), expected)
    other = theirs.mT if lies == "out, in" else theirs
    y = F.grouped_mm(xs[1], other, offs=ends)
    assert_same(y, expected)
    expected.backward(grad)
    y.backward(grad)
    assert_same(xs[1].grad, xs[0].grad)
    assert_same(theirs.grad, ours.grad)
    assert "_grouped_mm" not in qshard.backend_report()


def test_ends_that_leave_the_input_are_clamped():
    ours, theirs = stack_of(4, OUT, IN, "float8_tensorwise")
    x = torch.randn(9, IN)
    grad = torch.randn(9, OUT)
    ends = torch.tensor([-3, 5, 2, 100], dtype=torch.int32)
    expected, gradient = by_linears(x, theirs, ends, grad)
    x.requires_grad_()
    y = ops.grouped_linear(x, ours, ends)
    y.backward(grad)
    assert_same(y, expected)
    assert_same(x.grad, gradient)
    assert_same(ours.grad, theirs.grad)


@pytest.mark.parametrize("rows", [0, 5], ids=["no rows", "rows of none"])
def test_no_expert_has_rows(rows):
    ours, _ = stack_of(3, OUT, IN, "nvfp4")
    x = torch.full((rows, IN), NAN, requires_grad=True)
    y = ops.grouped_linear(x, ours, torch.zeros(3, dtype=torch.int32))
    y.sum().backward()
    assert_same(y, torch.zeros(rows, OUT))
    assert_same(x.grad, torch.zeros(rows, IN))
    assert_same(ours.grad, torch.zeros(3, OUT, IN))


@pytest.mark.parametrize("format", ["float8_blockwise[emulate]", "mxfp8[emulate]", "nvfp4[emulate]"])
def test_matrices_without_rows(format):
    stack = ops.quantize(torch.randn(3, 0, IN), format).requires_grad_()
    x = torch.randn(5, IN, requires_grad=True)
    y = ops.grouped_linear(x, stack, torch.tensor([1, 2, 5], dtype=torch.int32))
    y.backward(torch.zeros(5, 0))
    assert y.shape == (5, 0) and stack.grad.shape == (3, 0, IN) and not x.grad.any()


@pytest.mark.parametrize("lies", ["out, in", "in, out"])
def test_expanded_gradients(lies):
    ends = ends_of(3, "none")
    stacks = stack_of(3, OUT, IN, "float8_blockwise")
    if lies == "in, out":
        stacks = stack_of(3, IN, OUT, "float8_blockwise")
    x = rows_of(ends, IN, 0, "cpu", torch.float32, 1)
    found = []
    for stack, reduce in zip(stacks, (torch.sum, lambda y: (y * torch.ones_like(y)).sum())):
        own = x.clone().requires_grad_()
        reduce(ops.grouped_linear(own, stack.mT if lies == "in, out" else stack, ends)).backward()
        found.append((own.grad, stack.grad))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_added_in_place(dtype):
    """An expert without rows leaves its part of .grad alone, whatever that holds."""
    ends = ends_of(4, "middle")
    ours, theirs = stack_of(4, OUT, IN, "float8_blockwise", dtype=dtype)
    before = torch.randn(4, OUT, IN).to(dtype)
    for stack in (ours, theirs):
        stack.grad = before.clone()
    ours.grad[2] = NAN
    memory = ours.grad.data_ptr()
    x = rows_of(ends, IN, 1, "cpu", dtype, 1)
    grad = rows_of(ends, OUT, 1, "cpu", dtype, 2)
    by_linears(x, theirs, ends, grad)
    ops.grouped_linear(x, ours, ends).backward(grad)
    assert ours.grad.data_ptr() == memory
    assert ours.grad[2].isnan().all()
    for e in (0, 1, 3):
        assert_same(ours.grad[e], theirs.grad[e])


def test_one_gradient_alone():
    """Neither reads the other operand: the weight may be written before its own gradient is asked for."""
    ends = ends_of(3, "first")
    x = rows_of(ends, IN, 2, "cpu", torch.float32, 1)
    grad = rows_of(ends, OUT, 2, "cpu", torch.float32, 2)
    for format in ("float8_blockwise", "float8_delayed"):
        ours, theirs = stack_of(3, OUT, IN, format)
        _, gradient = by_linears(x, theirs, ends, grad)
        y = ops.grouped_linear(x, ours, ends)
        with torch.no_grad():
            ours.mul_(2)
        y.backward(grad)
        assert_same(ours.grad, theirs.grad)
        own = x.clone().requires_grad_()
        frozen = stack_of(3, OUT, IN, format)[0].requires_grad_(False)
        ops.grouped_linear(own, frozen, ends).backward(grad)
        assert_same(own.grad, gradient)


@pytest.mark.parametrize("format", FORMATS)
def test_hooks_on_saved_tensors(format):
    ends = ends_of(3, "none")
    x = rows_of(ends, IN, 0, "cpu", torch.float32, 1)
    found, seen = [], []
    for stack, pack in zip(stack_of(3, OUT, IN, format), (None, lambda t: seen.append(t) or t)):
        own = x.clone().requires_grad_()
        if pack is None:
            y = ops.grouped_linear(own, stack, ends)
        else:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = ops.grouped_linear(own, stack, ends)
        y.square().sum().backward()
        found.append((own.grad, stack.grad))
    assert seen
    assert_same(found[1][0], found[0][0])
    assert_same(found[1][1], found[0][1])


def test_autocast():
    ends = ends_of(3, "none")
    stack, _ = stack_of(3, OUT, IN, "float8_blockwise")
    x = rows_of(ends, IN, 0, "cpu", torch.float32, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.grouped_linear(x, stack, ends)
    assert_same(y, ops.grouped_linear(x.bfloat16(), stack, ends))


@pytest.mark.parametrize("lies", ["out, in", "in, out"])
def test_compiled(lies):
    ends = ends_of(3, "middle")
    shape = (OUT, IN) if lies == "out, in" else (IN, OUT)
    stacks = stack_of(3, *shape, "float8_blockwise")
    x = rows_of(ends, IN, 2, "cpu", torch.float32, 1)

    def run(x, stack, ends):
        weight = stack if lies == "out, in" else stack.mT
        return ops.grouped_linear(x, weight, ends, format="float8_blockwise").square()

    found = []
    for stack, call in zip(stacks, (run, torch.compile(run, backend="aot_eager", fullgraph=True))):
        own = x.clone().requires_grad_()
        y = call(own, stack, ends)
        y.sum().backward()
        found.append((y.detach(), own.grad, stack.grad))
    for eager, compiled in zip(*found):
        assert_same(compiled, eager)


@pytest.mark.parametrize("lies", ["out, in", "in, out"])
def test_fakes_lie_as_what_they_stand_for(lies):
    """Inductor reads and writes by the strides that it was told."""
    stack, _ = stack_of(3, *((OUT, IN) if lies == "out, in" else (IN, OUT)), "float8_blockwise")
    weight, x, grad = (stack if lies == "out, in" else stack.mT).detach(), torch.randn(6, IN), torch.randn(6, OUT)
    arguments = (False, True, True, False, None, "float8_blockwise")
    strides = []
    for where in ("cpu", "meta"):
        tensors = (t.to(where) for t in (grad, torch.empty_like(weight + 0) if where == "meta" else weight, x))
        ends = ends_of(3, "none").to(where)
        made = ops.linear_backward(*tensors, *arguments, offs=ends)
        strides.append([gradient.stride() for gradient in made])
    assert strides[0] == strides[1]


def test_weight_only():
    ends = ends_of(3, "none")
    stack, _ = stack_of(3, OUT, IN, "nvfp4")
    x = rows_of(ends, IN, 0, "cpu", torch.float32, 1)
    values = ops.dequantize(stack.detach())
    y = ops.grouped_linear(x, stack, ends, weight_only=True)
    expected = [F.linear(x[rows], values[e]) for e, rows in enumerate(parts(ends))]
    assert_same(y, torch.cat(expected))


def test_plain_weight_of_a_quantized_module():
    ends = ends_of(3, "none")
    values = torch.randn(3, OUT, IN)
    x = rows_of(ends, IN, 0, "cpu", torch.float32, 1)
    q = ops.quantize(values, "float8_blockwise")
    y = ops.grouped_linear(x, values, ends, format="float8_blockwise")
    assert_same(y, ops.grouped_linear(x, q, ends))
    with pytest.raises(RuntimeError, match="grouped_linear: the weight is a plain Float tensor"):
        ops.grouped_linear(x, values, ends)


def test_flops():
    ends = ends_of(3, "none")
    stack, _ = stack_of(3, OUT, IN, "float8_blockwise")
    x = rows_of(ends, IN, 0, "cpu", torch.float32, 1).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        ops.grouped_linear(x, stack, ends).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * len(x) * OUT * IN


X, OFFS = torch.randn(6, IN), torch.tensor([2, 6], dtype=torch.int32)
WRONG = {
    "dtype of offs": (lambda q: (X, q, OFFS.long()), r"offs must be a plain int32 .*shape \(2,\)"),
    "length of offs": (lambda q: (X, q, OFFS[:1]), r"offs must be a plain int32 .*shape \(2,\)"),
    "offs of two dimensions": (lambda q: (X, q, OFFS[None]), "offs must be a plain int32"),
    "device of offs": (lambda q: (X, q, OFFS.to("meta")), "all tensors must be on one device"),
    "columns": (lambda q: (X[:, :-1], q, OFFS), r"needs an input \(rows, in\)"),
    "input of three dimensions": (lambda q: (X[None], q, OFFS), r"needs an input \(rows, in\)"),
    "one matrix": (lambda q: (X, q[0], OFFS), r"a weight \(experts, out, in\)"),
    "part of matrices": (lambda q: (X, q[:, ::2], OFFS), "must be a stack of whole matrices"),
    "dtype of the input": (lambda q: (X.double(), q, OFFS), "input dtype Double"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors(what):
    arguments, message = WRONG[what]
    stack, _ = stack_of(2, OUT, IN, "float8_tensorwise")
    with pytest.raises(RuntimeError, match=f"qshard::grouped_linear.*{message}"):
        ops.grouped_linear(*arguments(stack.detach()))
