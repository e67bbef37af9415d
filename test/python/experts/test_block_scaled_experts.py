"""Experts on MXFP8 and NVFP4 codes by torch's `_scaled_grouped_mm_v2`, which Blackwell alone has.

A kernel in its place, `reference.scaled_grouped_mm`, reads on the CPU the bytes that a GPU would be handed. Sums of
these operands are exact in fp32, so that the products have the bits of the emulated GEMMs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from arrived_rows import ROWS_OF_MX
from expert_cases import EMPTY, NAN, ends_of, fill_freed_memory, parts
from helpers import assert_same, ops
from reference.scaled_grouped_mm import scaled_grouped_mm

import qshard

FORMATS = (
    "mxfp8[emulate]",
    "mxfp8_1x32[rowwise,emulate]",
    "nvfp4[nearest_gradients,emulate]",
    "nvfp4[no_hadamard,nearest_gradients,emulate]",
    "nvfp4_1x16[no_hadamard,nearest_gradients,emulate]",
)
TAIL = 3
# (out, in): of whole tiles, of more than one tile of rows, of parts of blocks.
SIZES = ((128, 128), (144, 200), (80, 288), (48, 33), (16, 8))


@pytest.fixture(autouse=True)
def one_thread():
    """For products this small, others cost more time than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Operator:
    """Registered for the CPU while it is open."""

    def __init__(self, function=scaled_grouped_mm):
        self.calls, self.function = 0, function

    def __enter__(self):
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("_scaled_grouped_mm_v2", self.run, "CPU")
        return self

    def run(self, *args):
        self.calls += 1
        return self.function(*args)

    def __exit__(self, *_):
        self.library._destroy()


def whole_numbers(*shape, seed):
    """Whose products with each other add up without rounding, in blocks of other scales."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, shape, generator=generator).float()
    return x * (2.0 ** (torch.arange(shape[0]) % 3)).view(-1, *[1] * (len(shape) - 1))


def case(format, count, empty, sizes, dtype=torch.bfloat16, rows=9):
    """A stack, x, ends and a gradient; rows of none are NaNs."""
    ends = ends_of(count, empty) * rows
    out, width = sizes
    stack = ops.quantize(whole_numbers(count, out, width, seed=1), format).requires_grad_()
    x, grad = (whole_numbers(int(ends[-1]) + TAIL, size, seed=seed) for size, seed in ((width, 2), (out, 3)))
    for e, part in enumerate(parts(ends)):
        x[part] *= 4.0 ** (e % 3)
    x[ends[-1] :] = NAN
    grad[ends[-1] :] = NAN
    return stack, x.to(dtype), ends, grad.to(dtype)


def step(stack, x, ends, grad, transposed=False):
    """Output and gradients, those of the stack added to what is there."""
    x = x.detach().requires_grad_()
    y = ops.grouped_linear(x, stack.mT if transposed else stack, ends)
    y.backward(grad)
    return y.detach(), x.grad, stack.grad.clone()


def emulated(*args, **kwargs):
    """step, where the gradient of the weights was rounded to bfloat16 as a product is."""
    y, x_grad, weight_grad = step(*args, **kwargs)
    args[0].grad = None
    return y, x_grad, weight_grad.bfloat16().float()


def calls_of(format):
    """How many GEMMs of one step the operator takes: blocks of one row have no transpose."""
    return 2 if "_1x" in format else 3


def check(found, expected):
    for name, one, other in zip(("output", "grad_input", "grad_weight"), found, expected, strict=True):
        assert_same(one, other, name)


@pytest.mark.pairwise
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("format", FORMATS)
def test_products_have_the_bits_of_emulated_ones(format, count, empty, sizes):
    stack, x, ends, grad = case(format, count, empty, sizes)
    expected = emulated(stack, x, ends, grad)
    fill_freed_memory(x, grad, stack.detach() + 0)
    with Operator() as operator:
        found = step(stack, x, ends, grad)
        assert operator.calls >= calls_of(format) or ends[-1] == 0
        check(found, expected)
        *_, twice = step(stack, x, ends, grad)  # added to the gradient that is there
    assert_same(twice, 2 * expected[2])
    for e, part in enumerate(parts(ends)):
        assert part.start < part.stop or not stack.grad[e].any()


@pytest.mark.parametrize("format", [*FORMATS, "mxfp8_1x32[emulate]"])
def test_groups_of_several_tiles(format):
    stack, x, ends, grad = case(format, 3, "middle", (160, 96), rows=40)
    expected = emulated(stack, x, ends, grad)
    with Operator():
        check(step(stack, x, ends, grad), expected)


@pytest.mark.parametrize("format", [format for format in FORMATS if "_1x" not in format])
def test_matrices_that_lie_as_in_out(format):
    """Their gradient is that of a plain product."""
    stack, x, ends, grad = case(format, 3, "first", (80, 48))
    x, grad = grad, x
    expected = step(stack, x, ends, grad, transposed=True)[:2]
    stack.grad = None
    with Operator() as operator:
        found = step(stack, x, ends, grad, transposed=True)
    assert operator.calls == 2
    for one, other in zip(found, expected):
        assert_same(one, other)


@pytest.mark.parametrize("format", ["mxfp8[emulate]", "nvfp4[nearest_gradients,emulate]"])
def test_ends_that_leave_the_input_are_clamped(format):
    stack, x, _, grad = case(format, 4, "none", (48, 64))
    x, grad = x.nan_to_num(1), grad.nan_to_num(1)
    wild, right = (torch.tensor(ends, dtype=torch.int32) for ends in ([-3, 5, 2, 100_000], [0, 5, 5, len(x)]))
    expected = emulated(stack, x, right, grad)
    with Operator():
        check(step(stack, x, wild, grad), expected)


@pytest.mark.parametrize("format", ["mxfp8[emulate]", "mxfp8_1x32[emulate]"])
def test_tokens_that_arrive_in_codes(format):
    stack, x, ends, grad = case(format, 5, "last", (64, 96))
    x, grad = (ops.quantize(rows.nan_to_num(), ROWS_OF_MX) for rows in (x, grad))
    expected = emulated(stack, x, ends, grad)
    with Operator() as operator:
        check(step(stack, x, ends, grad), expected)
    assert operator.calls == calls_of(format)


def test_an_mlp_multiplies_codes():
    gate, up, down = (ops.quantize(whole_numbers(3, *shape, seed=i) / 8, "mxfp8[emulate]").requires_grad_()
                      for i, shape in enumerate(((96, 64), (96, 64), (64, 96))))  # fmt: skip
    _, x, ends, grad = case("mxfp8[emulate]", 3, "middle", (64, 64))

    def gradients():
        for stack in (gate, up, down):
            stack.grad = None
        given = x.detach().requires_grad_()
        y = ops.swiglu_experts(given, gate, up, down, ends)
        y.backward(grad)
        return y.detach(), given.grad, gate.grad, up.grad, down.grad

    expected = gradients()
    with Operator() as operator:
        found = gradients()
    assert operator.calls == 9
    for one, other in zip(found, expected):
        assert (one - other).norm() < 2**-7 * other.norm()


def test_gradients_round_by_words_of_each_call():
    stack, x, ends, _ = case("nvfp4[emulate]", 3, "first", (64, 48))
    grad = torch.randn(len(x), 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def gradients(seed):
        stack.grad = None
        torch.manual_seed(seed)
        return step(stack, x, ends, grad)[1:]

    with Operator():
        for first, same, other in zip(gradients(1), gradients(1), gradients(2)):
            assert_same(first, same)
            assert not torch.equal(first, other)
    mean = sum(gradients(seed)[0][: ends[-1]].float() for seed in range(8)) / 8
    with Operator():
        found = sum(gradients(seed)[0][: ends[-1]].float() for seed in range(8)) / 8
    assert (found - mean).norm() < 0.15 * mean.norm()


@pytest.mark.parametrize("shape", [(0, 3, 64, 48), (5, 3, 0, 48), (5, 3, 64, 0), (5, 0, 64, 48)], ids=str)
@pytest.mark.parametrize("format", ["mxfp8[emulate]", "nvfp4[emulate]"])
def test_what_has_no_elements(format, shape):
    rows, count, out, width = shape
    stack = ops.quantize(torch.randn(count, out, width), format).requires_grad_()
    x, grad = torch.randn(rows, width).bfloat16(), torch.randn(rows, out).bfloat16()
    ends = torch.full((count,), rows, dtype=torch.int32)
    expected = step(stack, x, ends, grad)
    stack.grad = None
    with Operator():
        check(step(stack, x, ends, grad), expected)


def test_the_report_names_the_path_and_others_take_that_of_before():
    count = 1025  # one more than MSLK takes
    for format, dtype, experts, is_taken in (
        ("mxfp8[emulate]", torch.bfloat16, 3, True),
        ("mxfp8[emulate]", torch.float32, 3, False),
        ("float8_blockwise[emulate]", torch.bfloat16, 3, False),
        ("mxfp8[emulate]", torch.bfloat16, count, False),
    ):
        stack = ops.quantize(torch.randn(experts, 16, 32), format)
        x, ends = torch.randn(8, 32, dtype=dtype), torch.full((experts,), 8, dtype=torch.int32)
        with Operator() as operator:
            ops.grouped_linear(x, stack, ends)
        assert (operator.calls > 0) == is_taken
    assert "mxfp8[emulate] forward of experts: grouped block-scaled GEMM" in qshard.backend_report()


REFUSED = """
import torch
from test_block_scaled_experts import Operator, case, step
from helpers import assert_same

def refuse(*_):
    raise NotImplementedError("mxfp8_mxfp8 grouped gemm requires compile with USE_MSLK")

stack, *others = case("mxfp8[emulate]", 3, "none", (64, 64))
expected = step(stack, *others)
with Operator(refuse) as operator:
    for _ in range(2):
        stack.grad = None
        for one, other in zip(step(stack, *others), expected):
            assert_same(one, other)
assert operator.calls == 1
"""


def test_an_operator_that_raises_is_not_there():
    """torch may be built without the kernels behind it. A process asks once."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
