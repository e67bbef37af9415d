"""The linears of experts on a GPU: one GEMM of codes for all of them, or one of values, and no wait of the host."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from expert_cases import EMPTY, NAN, by_linears, ends_of, fill_freed_memory, parts, rows_of, stack_of
from helpers import assert_same, ops

import qshard
from qshard._runtime.classes import TensorState

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = pytest.mark.skipif(
    CAPABILITY[0] not in (9, 10), reason="needs a GPU of compute capability 9.0 or 10"
)
on_hopper = pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a GPU of compute capability 9.0")
# The input's columns, which wgrad reads, have scales of 128x128 or of 1x128 codes. Per tensor each expert has a scale.
ON_CODES = ("float8_tensorwise", "float8_delayed", "float8_blockwise", "float8_blockwise[x_block_scaling_dim=1]")
ON_VALUES = ("float8_rowwise", "mxfp8", "nvfp4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# (out, in): multiples of 128, and neither.
SIZES = [(256, 384), (208, 400), (48, 72)]


def integers(*shape, most, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


# A scale of float32 is exact where the amax is the largest code times a power of two: 448 / 128, 57344 / 16384.
LARGEST = 3.5


def by_expert(x, ends):
    """x, whose experts have amaxes of their own, and NaNs behind them."""
    for e, rows in enumerate(parts(ends)):
        x[rows.start : rows.stop, 0][:1] = LARGEST
        x[rows] *= 4.0 ** (e % 4 - 2)
    x[int(ends[-1]) :] = NAN
    return x


def integer_case(format, count, empty, out, columns, dtype):
    """Operands that codes hold exactly, of sums that 14 bits hold: GEMMs of any order have the same bits."""
    ends = ends_of(count, empty)
    total = int(ends[-1])
    values = integers(count, out, columns, most=3, seed=count)
    values[:, 0, 0] = LARGEST
    values = values.cuda()
    stack = ops.quantize(values, format).requires_grad_()
    assert torch.equal(ops.dequantize(stack.detach()), values)
    x = by_expert(integers(total + 3, columns, most=3, seed=1), ends).to("cuda", dtype)
    grad = by_expert(integers(total + 3, out, most=3, seed=2), ends).to("cuda", dtype)
    return stack, values, x, grad, ends


def exact_values(format, *shape):
    """Which codes of the format hold: of NVFP4 codes times scales that are both exact."""
    values = integers(*shape, most=1, seed=shape[0])
    if format == "nvfp4":
        values[..., ::16, ::16] = 6
        values[:, :16, :16] = 0
        values[:, 0, 0] = 10.5
    return values.cuda()


def by_products(x, values, ends, grad):
    """Output and gradients, in float64."""
    x, values, grad = x.double(), values.double(), grad.double()
    output, grad_x = grad.new_zeros(len(x), values.shape[1]), torch.zeros_like(x)
    grad_weight = torch.zeros_like(values)
    for e, rows in enumerate(parts(ends)):
        output[rows] = x[rows] @ values[e].t()
        grad_x[rows] = grad[rows] @ values[e]
        grad_weight[e] = grad[rows].t() @ x[rows]
    return output, grad_x, grad_weight


@contextlib.contextmanager
def no_synchronization():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(x, stack, ends, grad):
    x = x.clone().requires_grad_()
    y = ops.grouped_linear(x, stack, ends.cuda())
    y.backward(grad)
    return y.detach(), x.grad


@on_hopper
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 64, 256])
@pytest.mark.parametrize("format", ON_CODES)
def test_products_of_codes(format, count, size, empty, dtype):
    stack, values, x, grad, ends = integer_case(format, count, empty, *size, dtype)
    output, grad_x, grad_weight = by_products(x, values, ends, grad)
    fill_freed_memory(grad, x, values, output.to(dtype))
    y, gradient = run(x, stack, ends, grad)
    assert_same(y, output.to(dtype))
    assert_same(gradient, grad_x.to(dtype))
    assert_same(stack.grad, grad_weight.float())


@pytest.mark.pairwise
@pytest.mark.parametrize("lies", ["out, in", "in, out"])
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 8, 64])
@pytest.mark.parametrize("format", ON_VALUES)
def test_products_of_values(format, count, size, empty, lies):
    out, columns = size
    ends = ends_of(count, empty)
    shape = (count, out, columns) if lies == "out, in" else (count, columns, out)
    values = exact_values(format, *shape)
    stack = ops.quantize(values, format)
    assert torch.equal(ops.dequantize(stack), values)
    stack = stack.bfloat16().requires_grad_()
    x = by_expert(integers(int(ends[-1]) + 3, columns, most=3, seed=1), ends).cuda().bfloat16()
    grad = by_expert(integers(int(ends[-1]) + 3, out, most=3, seed=2), ends).cuda().bfloat16()
    of_linear = values if lies == "out, in" else values.mT
    output, grad_x, grad_weight = by_products(x, of_linear, ends, grad)
    fill_freed_memory(grad, x, values, output.bfloat16())
    x.requires_grad_()
    with no_synchronization():
        y = ops.grouped_linear(x, stack if lies == "out, in" else stack.mT, ends.cuda(non_blocking=True))
        y.backward(grad)
    assert_same(y.detach(), output.bfloat16())
    assert_same(x.grad, grad_x.bfloat16())
    assert_same(stack.grad, (grad_weight if lies == "out, in" else grad_weight.mT).bfloat16())


@on_hopper
@pytest.mark.parametrize("format", ON_CODES)
def test_stacks_that_lie_as_in_out(format):
    stack, values, x, grad, ends = integer_case(format, 5, "middle", 256, 384, torch.bfloat16)
    turned = ops.quantize(values.mT.contiguous(), format).requires_grad_()
    output, grad_x, grad_weight = by_products(x, values, ends, grad)
    y, gradient = run(x, turned.mT, ends, grad)
    assert_same(y, output.bfloat16())
    assert_same(gradient, grad_x.bfloat16())
    assert_same(turned.grad, grad_weight.mT.bfloat16().float())


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ON_CODES)
def test_codes_are_those_of_a_linear_of_each_expert(format, dtype):
    """Products with an identity are the codes' values: of rows in forward and dgrad, of columns in wgrad."""
    ends = torch.tensor([100, 100, 101, 229, 480], dtype=torch.int32)
    size = 256
    identity = torch.eye(size, device="cuda").repeat(len(ends), 1, 1)
    ours, theirs = [ops.quantize(identity, f).requires_grad_() for f in (format, emulated(format))]
    x = rows_of(ends, size, 5, "cuda", dtype, 1)
    grad = rows_of(ends, size, 5, "cuda", dtype, 2)
    expected, gradient = by_linears(x, theirs, ends, grad)
    y, own = run(x, ours, ends, grad)
    assert_same(y, expected)
    assert_same(own, gradient)
    unit = torch.zeros_like(grad)
    for rows in parts(ends):
        unit[rows] = torch.eye(size, device="cuda", dtype=dtype)[: rows.stop - rows.start]
    for one, other in ((x, unit), (unit, x)):
        ours.grad = theirs.grad = None
        by_linears(one, theirs, ends, other)
        run(one, ours, ends, other)
        assert_same(ours.grad, theirs.grad)


def emulated(format):
    return format[:-1] + ",emulate]" if format.endswith("]") else f"{format}[emulate]"


@on_hopper
@pytest.mark.parametrize("format", ON_CODES)
def test_products_of_random_values_are_near_the_emulated(format):
    """Hopper's FP8 sums keep 14 bits: each element within 2^-12 of the sum of its products' sizes, and its rounding."""
    ends = ends_of(8, "middle") * 30
    ours = stack_of(8, 384, 512, format, "cuda")[0]
    theirs = stack_of(8, 384, 512, emulated(format), "cuda")[0]
    x = rows_of(ends, 512, 5, "cuda", torch.float32, 1)
    grad = rows_of(ends, 384, 5, "cuda", torch.float32, 2)
    expected = by_linears(x, theirs, ends, grad)
    found = run(x, ours, ends, grad)
    sizes = by_products(x.nan_to_num().abs(), ours.detach().abs() + 0, ends, grad.nan_to_num().abs())
    for one, other, size in zip((*found, ours.grad), (*expected, theirs.grad), sizes):
        assert ((one.double() - other.double()).abs() <= 1.2 * 2**-12 * size).all()


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ON_CODES)
def test_an_expert_has_the_same_bits_alone(format, dtype):
    ends = torch.tensor([300, 300, 301, 814, 900], dtype=torch.int32)
    stack = stack_of(5, 256, 384, format, "cuda")[0]
    x = rows_of(ends, 384, 7, "cuda", dtype, 1)
    grad = rows_of(ends, 256, 7, "cuda", dtype, 2)
    y, gradient = run(x, stack, ends, grad)
    for e, rows in enumerate(parts(ends)):
        one = stack.detach()[e : e + 1].requires_grad_()
        end = torch.tensor([rows.stop - rows.start], dtype=torch.int32)
        of_one, own = run(x[rows], one, end, grad[rows])
        assert_same(of_one, y[rows])
        assert_same(own, gradient[rows])
        assert_same(one.grad[0], stack.grad[e])


@on_hopper
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("format", ON_CODES)
def test_gradients_are_added_within_the_gemm(format, size, into):
    stack, values, x, grad, ends = integer_case(format, 4, "middle", *size, torch.bfloat16)
    stack = stack.detach().to(into).requires_grad_()
    before = integers(*values.shape, most=8, seed=3).to("cuda", into)
    before[2] = -0.0
    before[2, 0] = NAN
    stack.grad = before.clone()
    memory = stack.grad.data_ptr()
    _, _, grad_weight = by_products(x, values, ends, grad)
    run(x, stack, ends, grad)
    assert stack.grad.data_ptr() == memory
    expected = before + grad_weight.to(into)
    expected[2] = before[2]
    view = torch.int32 if into == torch.float32 else torch.int16
    assert_same(stack.grad.view(view), expected.view(view))


@pytest.mark.parametrize("format", [*ON_CODES, *ON_VALUES])
def test_the_host_waits_for_nothing(format):
    ends = ends_of(8, "middle")
    stack = stack_of(8, 256, 384, format, "cuda", torch.bfloat16)[0]
    x = rows_of(ends, 384, 5, "cuda", torch.bfloat16, 1).requires_grad_()
    grad = rows_of(ends, 256, 5, "cuda", torch.bfloat16, 2)
    offs = ends.cuda()
    ops.grouped_linear(x, stack, offs).backward(grad)
    with no_synchronization():
        ops.grouped_linear(x, stack, offs).backward(grad)
        F.grouped_mm(x, stack.mT, offs=offs).backward(grad)


@pytest.mark.parametrize("format", [*ON_CODES, "mxfp8"])
def test_a_graph_is_replayed_with_other_ends(format):
    stack = stack_of(4, 256, 384, format, "cuda", torch.bfloat16)[0]
    x = torch.randn(500, 384, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(500, 256, device="cuda", dtype=torch.bfloat16)
    offs = torch.tensor([100, 200, 300, 500], dtype=torch.int32, device="cuda")

    def step():
        x.grad = stack.grad = None
        y = ops.grouped_linear(x, stack, offs)
        y.backward(grad)
        return y.detach(), x.grad, stack.grad

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for ends in ([0, 7, 490, 490], [500] * 4, [0] * 4, [128, 256, 384, 499]):
        offs.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        found = [one.clone() for one in captured]
        for one, other in zip(found, step()):
            assert_same(one, other)


def test_what_runs_expert_by_expert_cannot_be_captured():
    stack = stack_of(2, 64, 64, "float8_tensorwise[emulate]", "cuda")[0]
    x = torch.randn(8, 64, device="cuda")
    offs = torch.tensor([3, 8], dtype=torch.int32, device="cuda")
    ops.grouped_linear(x, stack, offs)
    with pytest.raises(RuntimeError, match="grouped_linear: these experts run one after the other"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ops.grouped_linear(x, stack, offs)


@pytest.mark.parametrize("format", [*ON_CODES, "mxfp8"])
def test_grouped_mm_is_grouped_linear(format):
    ends = ends_of(5, "first") * 20
    stacks = stack_of(5, 256, 384, format, "cuda", torch.bfloat16)
    x = rows_of(ends, 384, 5, "cuda", torch.bfloat16, 1)
    grad = rows_of(ends, 256, 5, "cuda", torch.bfloat16, 2)
    y, gradient = run(x, stacks[0], ends, grad)
    own = x.clone().requires_grad_()
    other = F.grouped_mm(own, stacks[1].mT, offs=ends.cuda())
    other.backward(grad)
    assert_same(other.detach(), y)
    assert_same(own.grad, gradient)
    assert_same(stacks[1].grad, stacks[0].grad)


@pytest.mark.parametrize("format", [*ON_CODES, "mxfp8"])
def test_ends_that_leave_the_input_are_clamped(format):
    stacks = stack_of(4, 64, 128, format, "cuda", torch.bfloat16)
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    wild = torch.tensor([-3, 5, 2, 100_000], dtype=torch.int32)
    found = run(x, stacks[0], wild, grad)
    expected = run(x, stacks[1], torch.tensor([0, 5, 5, 300], dtype=torch.int32), grad)
    for one, other in zip((*found, stacks[0].grad), (*expected, stacks[1].grad)):
        assert_same(one, other)


@on_hopper
def test_the_report_names_the_path():
    ends = ends_of(3, "none")
    lines = {
        "float8_blockwise": "float8_blockwise {} of experts: grouped FP8 GEMM",
        "float8_rowwise": "float8_rowwise {} of experts: grouped GEMM of dequantized codes",
        "mxfp8": "mxfp8 {} of experts: grouped GEMM of dequantized codes",
        "float8_tensorwise[emulate]": "float8_tensorwise[emulate] {} of experts: one expert after the other, synchronises",
    }
    for format, line in lines.items():
        stack = stack_of(3, 64, 128, format, "cuda", torch.bfloat16)[0]
        x = rows_of(ends, 128, 1, "cuda", torch.bfloat16, 1)
        run(x, stack, ends, rows_of(ends, 64, 1, "cuda", torch.bfloat16, 2))
        for direction in ("forward", "grad_input", "grad_weight"):
            assert line.format(direction) in qshard.backend_report()


@pytest.mark.parametrize("empty", ["none", "last"])
def test_delayed_scaling_collects_the_amax_of_all_experts_rows(empty):
    ends = ends_of(4, empty)
    ours, theirs = stack_of(4, 64, 128, "float8_delayed", "cuda", torch.bfloat16)
    x = rows_of(ends, 128, 3, "cuda", torch.bfloat16, 1)
    grad = rows_of(ends, 64, 3, "cuda", torch.bfloat16, 2)
    run(x, ours, ends, grad)
    by_linears(x, theirs, ends, grad)
    assert_same(TensorState(ours).scaling_state()["amax_history"], TensorState(theirs).scaling_state()["amax_history"])
