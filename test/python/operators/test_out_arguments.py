"""Products read the codes of a quantized operand, whatever form they are called in: with out= or
without, in inference mode or with autograd, as an input of a linear or as its weight."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    FORMATS,
    fit,
    has_two_images,
    is_quantized,
    ops,
    quantized_alike,
    value,
    weight,
)

ROWS, COLS = 48, 40
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
formats = pytest.mark.parametrize("fmt", FORMATS)
MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
modes = pytest.mark.parametrize("mode", MODES)


def make(fmt, *shape, keep_master=True, seed=0):
    *batch, rows, cols = shape
    values = weight(*batch, fit(fmt, rows), cols, seed=seed)
    return ops.quantize(values, fmt, keep_master=keep_master)


def codes_of(tensor):
    """What products multiply by."""
    return ops.dequantize(tensor) if is_quantized(tensor) else tensor


def assert_close(actual, expected, note=""):
    """But for the order of sums. Reading a master instead of codes is off by 1 % and more."""
    assert not is_quantized(actual) and actual.shape == expected.shape, note
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < 1e-6, f"off by {error:.2%} {note}"


def x(*shape, seed=3):
    return weight(*shape, seed=seed)


# name: (function(q, out=None), of a matrix or of a stack of three)
PRODUCTS = {
    "matmul": (lambda q, **o: torch.matmul(x(5, q.shape[0]), q, **o), 2),
    "matmul, first": (lambda q, **o: torch.matmul(q, x(q.shape[1], 5), **o), 2),
    "matmul, transposed": (lambda q, **o: torch.matmul(x(5, q.shape[1]), q.t(), **o), 2),
    "matmul, vector": (lambda q, **o: torch.matmul(x(1, q.shape[0])[0], q, **o), 2),
    "matmul, by a vector": (lambda q, **o: torch.matmul(q, x(1, q.shape[1])[0], **o), 2),
    "matmul, batch": (lambda q, **o: torch.matmul(x(2, 5, q.shape[0]), q, **o), 2),
    "matmul, stack": (lambda q, **o: torch.matmul(x(3, 5, q.shape[1]), q, **o), 3),
    "matmul, stack first": (lambda q, **o: torch.matmul(q, x(q.shape[2], 5), **o), 3),
    "matmul, both": (lambda q, **o: torch.matmul(q, q.t(), **o), 2),
    "linalg.matmul": (lambda q, **o: torch.linalg.matmul(x(5, q.shape[0]), q, **o), 2),
    "inner": (lambda q, **o: torch.inner(x(5, q.shape[1]), q, **o), 2),
    "inner, first": (lambda q, **o: torch.inner(q, x(5, q.shape[1]), **o), 2),
    "inner, batch": (lambda q, **o: torch.inner(x(2, 5, q.shape[1]), q, **o), 2),
    "inner, vector": (lambda q, **o: torch.inner(q, x(1, q.shape[1])[0], **o), 2),
    "tensordot": (lambda q, **o: torch.tensordot(x(5, q.shape[0]), q, 1, **o), 2),
    "tensordot, first": (lambda q, **o: torch.tensordot(q, x(5, q.shape[1]), ([1], [1]), **o), 2),
    "tensordot, both": (lambda q, **o: torch.tensordot(q, q, ([0], [0]), **o), 2),
    "mm": (lambda q, **o: torch.mm(x(5, q.shape[0]), q, **o), 2),
    "mm, first": (lambda q, **o: torch.mm(q, x(q.shape[1], 5), **o), 2),
    "mv": (lambda q, **o: torch.mv(q, x(1, q.shape[1])[0], **o), 2),
    "addmm": (lambda q, **o: torch.addmm(x(1, q.shape[1])[0], x(5, q.shape[0]), q, **o), 2),
    "addmv": (lambda q, **o: torch.addmv(x(1, q.shape[0])[0], q, x(1, q.shape[1])[0], **o), 2),
    "bmm": (lambda q, **o: torch.bmm(x(3, 5, q.shape[1]), q, **o), 3),
    "bmm, first": (lambda q, **o: torch.bmm(q, x(3, q.shape[2], 5), **o), 3),
    "baddbmm": (
        lambda q, **o: torch.baddbmm(x(3, 5, q.shape[2]), x(3, 5, q.shape[1], seed=4), q, **o),
        3,
    ),
    "multi_dot": (lambda q, **o: torch.linalg.multi_dot([x(5, q.shape[0]), q, q.t()], **o), 2),
}


def operand(name, fmt, keep_master=True):
    dims = PRODUCTS[name][1]
    return make(fmt, *((3,) if dims == 3 else ()), ROWS, COLS, keep_master=keep_master)


@modes
@keep_or_not
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_out_is_that_without(name, keep_master, mode):
    function, _ = PRODUCTS[name]
    for fmt in FORMATS:
        q = operand(name, fmt, keep_master)
        with MODES[mode]():
            expected = function(q)
            if not has_two_images(fmt):  # sums over rows read the other image
                assert_close(expected, function(codes_of(q)), f"{fmt} without out=")
            out = torch.full_like(expected, 7.0)
            assert function(q, out=out) is out
            assert_close(out, expected, f"{fmt} into a tensor of the shape")
            grown = torch.empty(0)
            function(q, out=grown)
            assert_close(grown, expected, f"{fmt} into an empty tensor")
            strided = torch.zeros(*expected.shape, 2)[..., 0]
            function(q, out=strided)
            assert_close(strided, expected, f"{fmt} into a strided tensor")


@modes
@formats
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_written_operand(name, fmt, mode):
    """The write is not flushed yet: codes are those of the written value."""
    function, _ = PRODUCTS[name]
    q = operand(name, fmt)
    q.mul_(1.7)
    twin = quantized_alike(value(q), q)
    with MODES[mode]():
        out = torch.empty(0)
        function(q, out=out)
        assert_close(out, function(twin))


def test_out_that_is_quantized_holds_the_product():
    """Its value, then, is the product of codes."""
    for name in ("matmul", "inner", "tensordot", "mm", "addmm"):
        function, _ = PRODUCTS[name]
        for fmt in FORMATS:
            q = make(fmt, 32, 32)
            expected = function(q)
            out = ops.quantize(torch.zeros(32, 32), fmt, keep_master=True)[: expected.shape[0]]
            function(q, out=out)
            assert_close(value(out), expected, (name, fmt))


def test_of_a_wrong_shape_it_is_plain_torchs_error():
    q = operand("matmul", "float8_blockwise")
    for name in ("matmul", "inner", "tensordot"):
        function, _ = PRODUCTS[name]
        with pytest.raises(RuntimeError) as plain:
            function(codes_of(q), out=torch.empty(3, dtype=torch.int64))
        with pytest.raises(RuntimeError) as ours:
            function(q, out=torch.empty(3, dtype=torch.int64))
        assert type(ours.value) is type(plain.value)


# ----------------------------------------------------------------------- an input of a linear

LINEARS = {
    "plain weight": lambda q: F.linear(q, x(6, q.shape[-1])),
    "plain weight, bias": lambda q: F.linear(q, x(6, q.shape[-1]), x(1, 6)[0]),
    "vector weight": lambda q: F.linear(q, x(1, q.shape[-1])[0]),
    "quantized weight": lambda q: F.linear(q, quantized_weight(q)),
    "quantized weight, bias": lambda q: F.linear(q, quantized_weight(q), x(1, 64)[0]),
    "itself": lambda q: F.linear(q, q),
    "rows": lambda q: F.linear(q[3:9], x(6, q.shape[-1])),
    "one row": lambda q: F.linear(q[largest_row(q)], x(6, q.shape[-1])),
    "more dimensions": lambda q: F.linear(q.unsqueeze(0), x(6, q.shape[-1]), x(1, 6)[0]),
    "nn.Linear": lambda q: module(q)(q),
}


def quantized_weight(q):
    return ops.quantize(x(64, q.shape[-1]), "float8_blockwise", keep_master=True)


def largest_row(q):
    """Smaller ones are zeros in NVFP4."""
    return int(codes_of(q).abs().amax(1).argmax())


def module(q):
    torch.manual_seed(0)
    return torch.nn.Linear(q.shape[-1], 6)


@modes
@keep_or_not
@formats
@pytest.mark.parametrize("name", LINEARS)
def test_a_quantized_input_of_a_linear(name, fmt, keep_master, mode):
    q = make(fmt, ROWS, COLS, keep_master=keep_master)
    expected = LINEARS[name](codes_of(q)).detach()
    with MODES[mode]():
        assert_close(LINEARS[name](q).detach(), expected)


@modes
@formats
def test_an_input_and_a_weight_by_autocast(fmt, mode):
    q = make(fmt, ROWS, COLS)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(codes_of(q), x(6, COLS))
        with MODES[mode]():
            assert_close(F.linear(q, x(6, COLS)), expected)


# ------------------------------------------------------------------- forms of the same product

FORMS = {
    "@": lambda a, q: a @ q.t(),
    "__rmatmul__": lambda a, q: q.t().__rmatmul__(a),
    "method": lambda a, q: a.matmul(q.t()),
    "mm": lambda a, q: a.mm(q.t()),
    "einsum": lambda a, q: torch.einsum("ij,kj->ik", a, q),
    "inner": lambda a, q: torch.inner(a, q),
    "tensordot": lambda a, q: torch.tensordot(a, q, ([1], [1])),
    "linear": F.linear,
    "chain_matmul": lambda a, q: torch.linalg.multi_dot([a, q.t()]),
    "addmm": lambda a, q: torch.addmm(torch.zeros(q.shape[0]), a, q.t()),
    "matmul out=": lambda a, q: torch.matmul(a, q.t(), out=torch.empty(0)),
    "mm out=": lambda a, q: torch.mm(a, q.t(), out=torch.empty(0)),
    "inner out=": lambda a, q: torch.inner(a, q, out=torch.empty(0)),
    "tensordot out=": lambda a, q: torch.tensordot(a, q, ([1], [1]), out=torch.empty(0)),
    "row by row": lambda a, q: torch.stack([torch.mv(q, row) for row in a]),
}


@modes
@formats
@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_one_product_multiply_the_same(form, fmt, mode):
    q, a = make(fmt, ROWS, COLS), x(5, COLS)
    exact = F.linear(a, ops.dequantize(q))
    with pytest.raises(AssertionError):  # reading the master would show
        assert_close(F.linear(a, value(q)), exact)
    with MODES[mode]():
        assert_close(FORMS[form](a, q), exact)
