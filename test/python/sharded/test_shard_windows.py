"""Windows of shards: whether a copy counts as a write, and whether what it makes is quantized, is
the same on every rank, whatever rows it holds. Values are those of such windows of plain shards."""

import copy
import zlib

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import device, full_mesh, gather_objects, on_ranks, on_worlds, same_on_all_ranks
from helpers import FORMATS, assert_same, fit, is_quantized, ops, value, weight
from models.weights import check_gathered, full_value, is_dirty, local
from torch import nn
from torch.distributed.fsdp import fully_shard

import qshard

BUDGET_S = 120
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
SHAPES = ((1, 64), (3, 64), (1, 32, 64), (3, 32, 64), (5, 48), (130, 64))
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def chosen(options, *names):
    """One of the options for each combination of names: all of them are too many."""
    options = list(options)
    return options[zlib.crc32(" ".join(map(str, names)).encode()) % len(options)]


class Holder(nn.Module):
    """One weight, a matrix or a stack of them."""

    def __init__(self, fmt, keep_master, shape, seed=0):
        super().__init__()
        *stack, rows, cols = shape
        values = weight(*stack, fit(fmt, rows), cols, seed=seed).to(device())
        self.weight = nn.Parameter(ops.quantize(values, fmt, keep_master=keep_master))

    def forward(self, x):
        return (x @ self.weight.mT).sum()


def make(fmt, keep_master, shape, seed=0, trained=False):
    model = fully_shard(Holder(fmt, keep_master, shape, seed), mesh=full_mesh())
    if trained:
        step(model)
    return model


def step(model):
    """A step of an optimizer, with a gradient that is the same on every mesh."""
    param = model.weight
    param.grad = torch.zeros_like(param)
    local(param.grad).fill_(0.25)
    torch.optim.SGD([param], lr=0.5).step()
    param.grad = None


def finish(model, twin, keep_master):
    """The value is the twin's, all ranks agree on whether a flush is due, and a step ends."""
    shard = local(model.weight).detach()
    assert_same(shard, twin)
    same_on_all_ranks(is_dirty(shard), "written")
    step(model)
    if keep_master:
        assert_same(local(model.weight), twin - 0.125)
        assert check_gathered(model, {"weight": full_value(model.weight)}) == 1
    else:
        assert check_gathered(model) == 1


COPIES = {
    "block of columns": lambda p, q: p[..., :32].copy_(q[..., :32]),
    "last columns": lambda p, q: p[..., 32:].copy_(q[..., 32:]),
    "every second column": lambda p, q: p[..., 1::2].copy_(q[..., 1::2]),
    "set every second column": lambda p, q: p.__setitem__((..., slice(1, None, 2)), q[..., 1::2]),
    "set columns": lambda p, q: p.__setitem__((..., slice(0, 32)), q[..., :32]),
    "one column": lambda p, q: p[..., 5].copy_(q[..., 5]),
    "transposed": lambda p, q: p.mT.copy_(q.mT),
    "transposed columns": lambda p, q: p.mT[:32].copy_(q.mT[:32]),
    "all": lambda p, q: p.copy_(q),
    "all columns": lambda p, q: p[..., :].copy_(q[..., :]),
    "all rows": lambda p, q: p[:].copy_(q[:]),
    "flat": lambda p, q: p.view(-1).copy_(q.view(-1)),
    "unsqueezed": lambda p, q: p.unsqueeze(0).copy_(q.unsqueeze(0)),
    "columns of other columns": lambda p, q: p[..., :32].copy_(q[..., -32:]),
    "every second row": lambda p, q: p[::2].copy_(q[::2]),
    "foreach": lambda p, q: torch._foreach_copy_([p[..., :32]], [q[..., :32]]),
    "no columns": lambda p, q: p[..., 3:3].copy_(q[..., 3:3]),
    "narrow": lambda p, q: p.narrow(-1, 16, 16).copy_(q.narrow(-1, 16, 16)),
}
SOURCES = {
    "another model": None,
    "clone": lambda p: p.clone(),
    "new_zeros": lambda p: p.new_zeros(p.shape),
    "new_empty, copied": lambda p: p.new_empty(p.shape).copy_(p),
    "empty_like, copied": lambda p: torch.empty_like(p).copy_(p),
    "zeros_like": torch.zeros_like,
    "deepcopy": copy.deepcopy,
    "plain": value,
    "itself, doubled": lambda p: p * 2,
    "another tensor": lambda p: ops.quantize(
        torch.cat([value(p)] * 2), "float8_blockwise", keep_master=True
    )[: len(p)],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("copied", COPIES)
@shapes
@keep_or_not
@on_ranks(2)
@torch.no_grad()
def test_a_copy_of_a_window(keep_master, shape, copied, source):
    fmt = chosen(FORMATS, keep_master, shape, copied, source)
    written = chosen(("fresh", "trained", "written"), shape, copied, source)
    model = make(fmt, keep_master, shape, trained=written != "fresh")
    p = local(model.weight).detach()
    if source == "another model":
        q = local(make(fmt, keep_master, shape, seed=1).weight).detach()
    else:
        q = SOURCES[source](p)
    twin, twin_source = value(p), value(q)
    if written == "written":
        p.mul_(1.5), twin.mul_(1.5)
    COPIES[copied](p, q)
    COPIES[copied](twin, twin_source)
    finish(model, twin, keep_master)


@pytest.mark.pairwise
@shapes
@keep_or_not
@on_ranks(2, 4)
@torch.no_grad()
def test_copies_between_two_models(shape, keep_master):
    """Between two models, each kind of window, and a flush of each."""
    facts = {}
    for copied in COPIES:
        fmt = chosen(FORMATS, shape, copied)
        model, other = (make(fmt, keep_master, shape, seed) for seed in (0, 1))
        p, q = local(model.weight).detach(), local(other.weight).detach()
        qshard.flush(model), qshard.flush(other)
        twin = value(p)
        COPIES[copied](p, q)
        COPIES[copied](twin, value(q))
        assert_same(p, twin, copied)
        facts[copied] = is_dirty(p)
        if len(set(gather_objects(facts[copied]))) == 1:
            qshard.flush(model)
    by_rank = gather_objects(facts)
    split = [name for name in COPIES if len({facts[name] for facts in by_rank}) > 1]
    assert not split, f"written on some ranks only: {split}"


# --------------------------------------------------------------------------- as DTensors do it

OF_DTENSORS = {
    "block of columns": lambda p, q: p[..., :32].copy_(q[..., :32]),
    "set every second column": lambda p, q: p.__setitem__((..., slice(1, None, 2)), q[..., 1::2]),
    "transposed": lambda p, q: p.mT.copy_(q.mT),
    "all": lambda p, q: p.copy_(q),
    "new_zeros": lambda p, q: p.copy_(p.new_zeros(p.shape)),
    "zeros_like": lambda p, q: p.copy_(torch.zeros_like(p)),
    "lerp_ of columns": lambda p, q: p[..., :32].lerp_(q[..., :32], 0.5),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("copied", OF_DTENSORS)
@shapes
@keep_or_not
@on_ranks(2, 4)
@torch.no_grad()
def test_a_copy_of_a_window_of_dtensors(keep_master, shape, copied):
    fmt = chosen(FORMATS, keep_master, shape, copied)
    model, other = (make(fmt, keep_master, shape, seed) for seed in (0, 1))
    plain, plain_other = full_value(model.weight), full_value(other.weight)
    OF_DTENSORS[copied](model.weight, other.weight)
    OF_DTENSORS[copied](plain, plain_other)
    same_on_all_ranks(is_dirty(model.weight), "written")
    assert_same(full_value(model.weight), plain)
    step(model)
    if keep_master:
        assert_same(full_value(model.weight), plain - 0.125)
    assert check_gathered(model) == 1


# ------------------------------------------------------------------------- what copies are

# contiguous() of a plain tensor is itself on ranks where it is contiguous, and a copy on others; and
# windows of some of the rows, which DTensor makes none of, differ between ranks by themselves.

RESULTS = {
    "block of columns": lambda p: p[..., :32].clone(),
    "last columns": lambda p: p[..., 32:].clone(),
    "every second column": lambda p: p[..., 1::2].clone(),
    "one column": lambda p: p[..., 7].clone(),
    "transposed": lambda p: p.mT.clone(),
    "all": lambda p: p.clone(),
    "all columns": lambda p: p[..., :].clone(),
    "unsqueezed": lambda p: p.unsqueeze(0).clone(),
    "flat": lambda p: p.view(-1).clone(),
    "to": lambda p: p[..., :32].to(p.device, copy=True),
    "to all": lambda p: p.to(p.device, copy=True),
    "non-blocking": lambda p: p.to(p.device, copy=True, non_blocking=True),
    "columns, non-blocking": lambda p: p[..., :32].to(p.device, copy=True, non_blocking=True),
    "deepcopy": copy.deepcopy,
    "cat of columns": lambda p: torch.cat([p[..., :32], p[..., 32:]], -1),
    "cat of chunks": lambda p: torch.cat(p.chunk(2, -1), -1),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p]),
    "pad": lambda p: F.pad(p, (0, 0, 0, 2)),
    "pad columns": lambda p: F.pad(p, (0, 3)),
    "empty_like of columns": lambda p: torch.empty_like(p[..., :32]).copy_(p[..., :32]),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda p: p.new_zeros(p.shape),
    "new_zeros of 2 rows": lambda p: p.new_zeros(2, *p.shape[1:]),
    "new_empty of columns": lambda p: p.new_empty(*p.shape[:-1], 32).copy_(p[..., :32]),
    "every second row": lambda p: p[::2].clone(),
    "no rows": lambda p: p[:0].clone(),
    "no columns": lambda p: p[..., 4:4].clone(),
    "float": lambda p: p.float(),
    "bfloat16": lambda p: p[..., :32].to(torch.bfloat16),
    "expanded": lambda p: p[..., :1].expand(*p.shape[:-1], 4).clone(),
}
WRITTEN = {"mul_": lambda t: t.mul_(2), "none": lambda t: t, "copy_": lambda t: t.copy_(t * 3)}


@pytest.mark.pairwise
@pytest.mark.parametrize("result", RESULTS)
@shapes
@keep_or_not
@on_ranks(2, 4)
@torch.no_grad()
def test_what_a_copy_of_a_window_is(keep_master, shape, result):
    """What a copy is, and is written, changes nothing for the parameter that it is of."""
    fmt = chosen(FORMATS, keep_master, shape, result)
    written = chosen(WRITTEN, shape, result)
    model = make(fmt, keep_master, shape, trained=True)
    p = local(model.weight).detach()
    before = value(p)
    made = RESULTS[result](p)
    same_on_all_ranks(is_quantized(made), "quantized")
    expected = RESULTS[result](before)
    WRITTEN[written](made), WRITTEN[written](expected)
    assert made.dtype == expected.dtype and made.shape == expected.shape
    if made.dtype == p.dtype:
        assert_same(made, expected)
    assert_same(p, before)
    same_on_all_ranks(is_quantized(made) and is_dirty(made), "a written copy")
    step(model)
    finish(model, value(local(model.weight)), keep_master)


@torch.no_grad()
def run_every_result(fmt, keep_master, shape):
    model = make(fmt, keep_master, shape, trained=True)
    p = local(model.weight).detach()
    facts = {name: is_quantized(result(p)) for name, result in RESULTS.items()}
    by_rank = gather_objects(facts)
    split = [name for name in RESULTS if len({facts[name] for facts in by_rank}) > 1]
    assert not split, f"quantized on some ranks only: {split}"


@shapes
@keep_or_not
@on_worlds(2, 4)
def test_all_ranks_have_quantized_copies_or_none(world, shape, keep_master):
    for fmt in FORMATS:
        world.run(run_every_result, fmt, keep_master, shape)
