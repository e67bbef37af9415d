"""Copies into another dtype, layout or memory are of the value, as those of plain tensors are."""

import pytest
import torch
from helpers import FORMATS, assert_same, fit, is_quantized, ops, rounded, value, weight

import qshard

formats = pytest.mark.parametrize("fmt", FORMATS)
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, COLS = 70, 48


def make(fmt, dtype=torch.float32, keep_master=False, rows=ROWS, cols=COLS):
    values = weight(fit(fmt, rows), cols, dtype=dtype)
    return ops.quantize(values, fmt, keep_master=keep_master)


# --------------------------------------------------------------------------------- dtypes

INTO = {
    "to": lambda t, dtype: t.to(dtype),
    "type": lambda t, dtype: t.type(dtype),
    "to, copy": lambda t, dtype: t.to(dtype, copy=True),
    "to, device": lambda t, dtype: t.to("cpu", dtype),
    "to, non_blocking": lambda t, dtype: t.to(dtype, non_blocking=True, copy=True),
    "type_as": lambda t, dtype: t.type_as(torch.empty(0, dtype=dtype)),
    "_to_copy": lambda t, dtype: torch.ops.aten._to_copy(t, dtype=dtype),
    "new_empty": lambda t, dtype: t.new_empty(t.shape, dtype=dtype).copy_(t),
    "empty_like": lambda t, dtype: torch.empty_like(t, dtype=dtype).copy_(t),
    "plain": lambda t, dtype: torch.empty(t.shape, dtype=dtype).copy_(t),
    "rows": lambda t, dtype: t[3:40].to(dtype),
    "columns": lambda t, dtype: t[:, 1::2].to(dtype),
    "transposed": lambda t, dtype: t.t().to(dtype),
}
STATES = {
    "flushed": lambda t: t,
    "written": lambda t: t.mul_(1.1),
    "written rows": lambda t: (t[3:9].mul_(1.1), t)[1],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nominal", DTYPES, ids=str)
@keep_or_not
@formats
def test_a_copy_in_another_dtype_has_the_value(fmt, keep_master, nominal, dtype):
    for (name, into), (state, write) in [(i, s) for i in INTO.items() for s in STATES.items()]:
        q = write(make(fmt, nominal, keep_master))
        plain = value(q)
        assert_same(into(q, dtype), into(plain, dtype), f"{name} of a {state} tensor")
        assert_same(q, plain, "the source")


@formats
def test_there_and_back_as_a_plain_tensor(fmt):
    """A bf16 tensor without a master: float16 has more bits of a mantissa, float32 has all."""
    for wide in (torch.float16, torch.float32, torch.float64):
        q = make(fmt, torch.bfloat16)
        plain = value(q)
        assert_same(q.to(wide).to(torch.bfloat16), plain.to(wide).to(torch.bfloat16), str(wide))


@formats
def test_a_product_of_a_narrower_copy(fmt):
    """It multiplies by what the copy's value is, or by codes of that."""
    for nominal, dtype in [(torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)]:
        q = make(fmt, nominal)
        copied = q.to(dtype)
        eye = torch.eye(COLS, dtype=dtype)
        expected = torch.nn.functional.linear(eye, value(q).to(dtype))
        got = torch.nn.functional.linear(eye, copied)
        codes = torch.nn.functional.linear(eye, rounded(value(q).to(dtype), fmt))
        assert torch.equal(got, expected) or torch.equal(got, codes)


def test_a_module_that_is_halved():
    """As plain modules: each parameter is its value in the new dtype."""
    for recipe in (qshard.NVFP4BlockScaling(), qshard.Float8CurrentScaling()):
        model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        qshard.quantize_(torch.nn.Sequential(model), recipe, keep_master=False)
        plain = value(model.weight)
        model.half()
        assert_same(model.weight, plain.half())
        model.bfloat16()
        assert_same(model.weight, plain.half().bfloat16())


# ------------------------------------------------------------------------- memory formats

DENSE, CHANNELS = torch.contiguous_format, torch.channels_last
LAYOUTS = {
    "clone, contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "clone, preserve": lambda t: t.clone(memory_format=torch.preserve_format),
    "clone, channels_last": lambda t: t.clone(memory_format=torch.channels_last),
    "contiguous": lambda t: t.contiguous(),
    "contiguous, channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "to, channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "to, copy": lambda t: t.to(t.dtype, copy=True, memory_format=DENSE),
    "empty_like, contiguous": lambda t: torch.empty_like(t, memory_format=DENSE).copy_(t),
    "empty_like, channels_last": lambda t: torch.empty_like(t, memory_format=CHANNELS).copy_(t),
    "zeros_like, contiguous": lambda t: torch.zeros_like(t, memory_format=DENSE),
    "empty_like": lambda t: torch.empty_like(t).copy_(t),
    "clone": torch.clone,
    "_to_copy": lambda t: torch.ops.aten._to_copy(t, memory_format=torch.contiguous_format),
}
VIEWS = {
    "matrix": lambda t: t,
    "transposed": lambda t: t.t(),
    "4-d": lambda t: t.view(-1, 8, 2, 3),
    "4-d, permuted": lambda t: t.view(-1, 8, 2, 3).permute(0, 2, 3, 1),
    "4-d, one channel": lambda t: t.view(-1, 1, 6, 8),
    "3-d": lambda t: t.view(-1, 6, 8),
    "rows": lambda t: t[2:9],
    "columns": lambda t: t[:, 4:20],
    "strided": lambda t: t[::2, ::2],
    "one row": lambda t: t[:1],
    "no rows": lambda t: t[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("view", VIEWS)
@keep_or_not
def test_a_memory_format_is_that_of_a_plain_copy(keep_master, view, layout):
    for fmt in ("float8_blockwise", "nvfp4", "mxfp8_1x32"):
        q = make(fmt, keep_master=keep_master, rows=96)
        ours, plain = VIEWS[view](q), VIEWS[view](value(q))
        try:
            expected = LAYOUTS[layout](plain)
        except RuntimeError as error:  # channels_last is of 4 dimensions
            with pytest.raises(RuntimeError, match=str(error).split("(")[0][:30]):
                LAYOUTS[layout](ours)
            continue
        got = LAYOUTS[layout](ours)
        assert got.stride() == expected.stride(), fmt
        assert got.storage_offset() == expected.storage_offset(), fmt
        for known in (torch.contiguous_format, torch.channels_last):
            if known is torch.contiguous_format or got.dim() == 4:
                assert got.is_contiguous(memory_format=known) == expected.is_contiguous(
                    memory_format=known
                )
        assert_same(got, expected, fmt)
        got.mul_(2), expected.mul_(2)
        assert_same(got, expected, fmt)
        assert_same(q, value(q))


# ---------------------------------------------------------------------------- pinned memory

PINNED = {
    "new_empty": lambda t: t.new_empty(t.shape, pin_memory=True),
    "new_zeros": lambda t: t.new_zeros(t.shape, pin_memory=True),
    "new_zeros of rows": lambda t: t.new_zeros(3, t.shape[1], pin_memory=True),
    "new_full": lambda t: t.new_full(t.shape, 1.0, pin_memory=True),
    "new_ones": lambda t: t.new_ones(t.shape, pin_memory=True),
    "empty_like": lambda t: torch.empty_like(t, pin_memory=True),
    "zeros_like": lambda t: torch.zeros_like(t, pin_memory=True),
    "pin_memory": lambda t: t.pin_memory(),
}


@keep_or_not
@pytest.mark.parametrize("name", PINNED)
def test_pinned_memory_is_pinned_or_refused_as_of_a_plain_tensor(name, keep_master):
    for fmt in FORMATS:
        q = make(fmt, keep_master=keep_master, rows=96)
        try:
            expected = PINNED[name](value(q)).is_pinned()
        except RuntimeError:
            with pytest.raises(RuntimeError):
                PINNED[name](q)
            continue
        assert PINNED[name](q).is_pinned() == expected, fmt
