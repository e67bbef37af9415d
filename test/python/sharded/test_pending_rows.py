"""Rows of quantized tensors that are copied over a write which awaits its flush: they are what was
copied, the rest is what was written, before the flush and after it, as in a plain tensor."""

import copy
import itertools

import pytest
import torch
from dist_helpers import full_mesh, on_ranks
from helpers import FORMATS, assert_same, ops, value, weight
from models.weights import check_gathered, full_value, local
from test_shard_windows import Holder, chosen, step
from torch.distributed.fsdp import fully_shard

import qshard
from qshard.formats import info_of

BUDGET_S = 60
formats = pytest.mark.parametrize("fmt", FORMATS)
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
ROWS, COLS = 128, 48  # a share that has its blocks for itself


def make(fmt, keep_master, seed=0):
    values = weight(ROWS, COLS, seed=seed)
    return ops.quantize(values, fmt, keep_master=keep_master)


def make_share(fmt, keep_master, seed=0):
    """Rows of a bigger tensor: only a collective could flush it."""
    values = weight(ROWS, COLS, seed=seed)
    whole = dict(logical_rows=3 * ROWS, row_offset=ROWS)
    return ops.quantize(values, fmt, keep_master=keep_master, **whole)


TENSORS = {
    "whole": make,
    "share": make_share,
    "new_zeros": lambda fmt, keep: (q := make(fmt, keep)).new_zeros(q.shape).copy_(q),
    "share's new_zeros": lambda fmt, keep: (q := make_share(fmt, keep)).new_zeros(q.shape).copy_(q),
    "clone": lambda fmt, keep: make_share(fmt, keep).clone(),
    "deepcopy": lambda fmt, keep: copy.deepcopy(make_share(fmt, keep)),
}
PENDING = {
    "all": lambda t: t.mul_(1.5),
    "some rows": lambda t: t[3:40].mul_(1.5),
    "columns": lambda t: t[:, :16].add_(3),
    "twice": lambda t: t.mul_(1.5)[2:9].fill_(7),
    "one value": lambda t: t[5, 7].fill_(100),
}


def image_copy(q):
    """As an offloaded shard goes to its device: codes alone, until its value is wanted."""
    return q.to(q.device, copy=True, non_blocking=True)


def first_rows(q, source):
    new = q.new_zeros(q.shape)
    new[:9].copy_(source[:9])
    return new


SOURCES = {  # of a quantized tensor
    "another share": lambda fmt, keep, q: make_share(fmt, keep, seed=1),
    "another whole": lambda fmt, keep, q: make(fmt, keep, seed=1),
    "its clone": lambda fmt, keep, q: q.clone(),
    "its deepcopy": lambda fmt, keep, q: copy.deepcopy(q),
    "its new_zeros": lambda fmt, keep, q: q.new_zeros(q.shape),
    "new_zeros, copied": lambda fmt, keep, q: q.new_zeros(q.shape).copy_(q),
    "a written share": lambda fmt, keep, q: make_share(fmt, keep, seed=1).mul_(3),
    "the other kind": lambda fmt, keep, q: make_share(fmt, not keep, seed=1),
    "a non-blocking copy": lambda fmt, keep, q: image_copy(q),
    "its first rows": lambda fmt, keep, q: first_rows(q, q),
    "first rows of a non-blocking copy": lambda fmt, keep, q: first_rows(q, image_copy(q)),
}
ROWS_COPIED = {
    "all": slice(None),
    "first": slice(0, 32),
    "middle": slice(17, 50),
    "last": slice(64, ROWS),
    "none": slice(8, 8),
}
SHOWN = {
    "not read": lambda t: None,
    "dequantized": lambda t: try_dequantize(t),
    "multiplied": lambda t: try_multiply(t),
    "read": lambda t: value(t),
}


def try_dequantize(t):
    """A share may refuse to show codes of what awaits a flush, but must not lose it."""
    try:
        ops.dequantize(t)
    except RuntimeError as error:
        assert "flush" in str(error)


def try_multiply(t):
    try:
        torch.nn.functional.linear(torch.ones(2, COLS), t)
    except RuntimeError as error:
        assert "flush" in str(error)


MADE = ("before the write", "after the write", "after it was read")


def run_rows(fmt, keep_master, tensor, pending, source, made, rows, shown):
    q = TENSORS[tensor](fmt, keep_master)
    twin, window = value(q), ROWS_COPIED[rows]
    make_source = lambda: [SOURCES[source](fmt, keep_master, q) for _ in range(2)]  # noqa: E731
    if made == "before the write":
        other, unread = make_source()
    PENDING[pending](q), PENDING[pending](twin)
    assert_same(q, twin)
    if made == "after the write":
        other, unread = make_source()
    SHOWN[shown](q)
    if tensor in ROUNDED_BY_READS and not keep_master:
        twin = value(q)
    assert_same(q, twin, "after it was read")
    if made == "after it was read":
        other, unread = make_source()
    twin_source = value(other)
    q[window].copy_(unread[window])
    twin[window].copy_(twin_source[window])
    assert_same(q, twin, "after the copy")
    SHOWN[shown](q)
    if tensor in ROUNDED_BY_READS and not keep_master:
        twin = value(q)
    assert_same(q, twin, "after the copy was read")
    assert_same(unread, twin_source, "the source")
    PENDING[pending](q), PENDING[pending](twin)
    assert_same(q, twin, "after another write")


ROUNDED_BY_READS = ("whole", "new_zeros")  # no other rank has to agree: reading codes is the flush


@pytest.mark.pairwise
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("made", MADE)
@keep_or_not
@formats
def test_rows_over_a_pending_write(fmt, keep_master, made, source):
    for tensor, rows, is_read in itertools.product(TENSORS, ROWS_COPIED, (False, True)):
        shown = chosen(("dequantized", "dequantized", "multiplied", "read"), source, rows, tensor)
        pending = chosen(PENDING, fmt, keep_master, source, rows, tensor)
        shown = shown if is_read else "not read"
        run_rows(fmt, keep_master, tensor, pending, source, made, rows, shown)


@pytest.mark.pairwise
@pytest.mark.parametrize("copied", ROWS_COPIED)
@pytest.mark.parametrize("rows", [1, 3, 133], ids="{} rows".format)
@keep_or_not
@formats
@on_ranks(2)
@torch.no_grad()
def test_rows_over_a_pending_write_of_a_shard(fmt, keep_master, rows, copied):
    """On shards, to the flush of all ranks: the gathered codes are of the value after the copy."""
    pending = chosen(("all", "columns"), fmt, keep_master, rows, copied)
    shown = chosen((True, False), keep_master, rows, copied)
    models = [Holder(fmt, keep_master, (rows, COLS), seed) for seed in (0, 1)]
    for model in models:
        step(fully_shard(model, mesh=full_mesh()))
    p, q = (local(model.weight).detach() for model in models)
    twin, other = value(p), value(q)
    PENDING[pending](p), PENDING[pending](twin)
    if shown:
        try_dequantize(p)
    window = ROWS_COPIED[copied]
    p[window].copy_(q[window])
    twin[window].copy_(other[window])
    assert_same(p, twin, "before the flush")
    values = full_value(models[0].weight)
    qshard.flush(models[0])
    if keep_master:
        assert_same(p, twin, "after the flush")
        assert check_gathered(models[0], {"weight": values}) == 1
        return
    shown = ops.dequantize(p)
    error = (shown - twin).norm() / twin.norm().clamp_min(1e-30)
    assert error < (0.3 if info_of(fmt).code_bits == 4 else 0.05), f"off by {error:.1%}"
    assert check_gathered(models[0]) == 1
