"""What is written to a weight that FSDP2 has gathered is gone with reshard(), as of a plain weight:
shards, their scales and every later gather stay those of a model that was never written."""

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks
from helpers import (
    FORMATS,
    assert_same,
    bits,
    fit,
    is_quantized,
    ops,
    quantized_alike,
    value,
    weight,
)
from models.formats import RECIPES
from models.training import batch, train
from models.weights import check_gathered, local, local_values
from torch import nn
from torch.distributed.fsdp import fully_shard

import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 75
COLS = 100  # WIDTH of models.blocks, whose batches are multiplied


def low_rank(w, rank=4):
    """The update of a LoRA adapter that is merged."""
    b, a = weight(w.shape[0], rank, seed=5), weight(rank, w.shape[1], seed=6)
    return b.to(w.device, w.dtype), a.to(w.device, w.dtype)


def merge(w):
    w.addmm_(*low_rank(w), alpha=4.0)


def merge_and_read_and_unmerge(w):
    b, a = low_rank(w)
    w.add_(b @ a, alpha=16.0)
    F.linear(torch.ones(2, w.shape[1], dtype=w.dtype, device=w.device), w)
    w.sub_(b @ a, alpha=16.0)


WRITES = {
    "mul_(4)": lambda w: w.mul_(4),
    "mul_(1/64)": lambda w: w.mul_(1 / 64),
    "merge": merge,
    "merge, read, unmerge": merge_and_read_and_unmerge,
    "copy_": lambda w: w.copy_(torch.linspace(-9e3, 9e3, w.numel()).view(w.shape)),
    "copy_ of quantized": lambda w: w.copy_(ops.quantize(value(w) * 256, "float8_blockwise")),
    "copy_ of itself, grown": lambda w: w.copy_(w * 32),
    "clamp_": lambda w: w.clamp_(-1e-3, 1e-3),
    "zero_": lambda w: w.zero_(),
    "fill_": lambda w: w.fill_(300.0),
    "one row": lambda w: w[:1].mul_(1024),
    "columns": lambda w: w[:, 1::2].mul_(64),
    "transposed": lambda w: w.t().mul_(8),
    "data": lambda w: w.data.mul_(16),
    "foreach": lambda w: torch._foreach_mul_([w], 16.0),
    "out=": lambda w: torch.mul(w, 16.0, out=w),
    "twice": lambda w: (w.mul_(256), F.linear(w, w), w.mul_(256)),
}
READS = {
    "linear": lambda w: F.linear(torch.eye(w.shape[1], dtype=w.dtype, device=w.device), w).t(),
    "dequantize": lambda w: ops.dequantize(w, dtype=w.dtype),
    "flush": lambda w: ops.flush([w]),
    "nothing": lambda w: None,
}


def make(format, keep_master=True, rows=257, trained=True, sharded=True):
    """A linear to itself: WIDTH features in and, of the rows, WIDTH out again."""
    torch.manual_seed(0)
    rows = fit(format, rows)
    model = nn.Sequential(nn.Linear(COLS, rows, bias=False), nn.Linear(rows, COLS, bias=False))
    model.to(device())
    chosen = lambda _, name: name == "0"  # noqa: E731
    qshard.quantize_(model, RECIPES[recipe_of(format)], filter_fn=chosen, keep_master=keep_master)
    model[0].weight.requires_grad_(trained)
    return fully_shard(model, mesh=full_mesh()) if sharded else model


def recipe_of(format):
    return next(f for f in RECIPES if f.split("[")[0] == format)


def shown_when_gathered(model):
    model.unshard()
    shown = ops.dequantize(model[0].weight.detach())
    model.reshard()
    return shown


def memory(model):
    """All that a write to what was gathered must leave alone: this rank's values and state."""
    shard = local(model[0].weight).detach()
    state = {name: t.clone() for name, t in TensorState(shard).scaling_state().items()}
    return value(shard), ops.dequantize(shard), state


def assert_same_memory(ours, theirs):
    (value_a, codes_a, state_a), (value_b, codes_b, state_b) = ours, theirs
    assert torch.equal(bits(value_a), bits(value_b)), "values of the shard"
    assert torch.equal(codes_a, codes_b), "codes of the shard"
    assert state_a.keys() == state_b.keys()
    for name in state_a:
        # The last two rows of a history are of the inputs and gradients that linears saw, as they do
        # in any forward.
        rows = slice(None, -2) if name == "amax_history" else slice(None)
        assert torch.equal(state_a[name][rows], state_b[name][rows]), name


@torch.no_grad()
def write_while_gathered(model, write, read):
    model.unshard()
    w = model[0].weight.detach()
    assert is_quantized(w)
    WRITES[write](w)
    READS[read](w)
    model.reshard()


@pytest.mark.pairwise
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("rows", [257, 1], ids="{} rows".format)
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", FORMATS)
@on_ranks(1, 2)
def test_a_write_is_gone_with_reshard(format, keep_master, rows, write, read):
    model, twin = (make(format, keep_master, rows) for _ in range(2))
    if read != "nothing":  # also where a flush has already found a grid
        assert train(model, steps=1) == train(twin, steps=1)
    else:
        shown_when_gathered(model), shown_when_gathered(twin)
    before = memory(model)
    assert_same_memory(before, memory(twin))
    for _ in range(2):
        write_while_gathered(model, write, read)
        assert_same_memory(memory(model), before)
        shown, expected = shown_when_gathered(model), shown_when_gathered(twin)
        wrong = (shown / expected)[shown != expected]
        assert not wrong.numel(), f"{wrong.numel()} values of {shown.numel()}, by {wrong[:4]}"
    x = batch(7)
    assert_same(model(x), twin(x))
    assert train(model, first_step=1) == train(twin, first_step=1)
    ours, theirs = local_values(model), local_values(twin)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert check_gathered(model) == 1


@pytest.mark.parametrize("format", FORMATS)
@on_ranks(2, 4)
def test_a_frozen_weight(format):
    """Nothing would flush a frozen weight again: what a gather reads stays wrong for ever."""
    model, twin = (make(format, trained=False, rows=3) for _ in range(2))
    x = batch(0)
    expected = twin(x)
    for write in ("mul_(4)", "clamp_", "merge"):
        write_while_gathered(model, write, "linear")
        assert_same(model(x), expected, write)
        with torch.no_grad():
            assert_same(model(x), expected, write)
    qshard.flush(model)
    assert_same(model(x), expected)


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", FORMATS)
@on_ranks(2)
def test_training_goes_on_as_without_the_writes(format, keep_master):
    """Write, read, reshard, between all steps."""
    model, twin = (make(format, keep_master) for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, twin)]
    # Delayed scaling scales inputs by those that linears saw before.
    read, last = ("dequantize", "fill_") if "delayed" in format else ("linear", "twice")
    for step, write in enumerate(("mul_(4)", "merge", "clamp_", last)):
        write_while_gathered(model, write, read)
        ours, theirs = (
            train(m, optimizer, steps=1, first_step=step)
            for m, optimizer in zip((model, twin), optimizers)
        )
        assert ours == theirs, (step, ours, theirs)
    assert_same_memory(memory(model), memory(twin))


# --------------------------------------------------- what the gathered weight shows itself


def check_what_is_shown(model, format, keep_master, write):
    model.unshard()
    w = model[0].weight.detach()
    plain = value(w)
    WRITES[write](w)
    WRITES[write](plain)
    assert_same(w, plain)
    # One whole matrix, quantized as on one device, with the scales of an earlier step where they are.
    expected = ops.dequantize(quantized_alike(plain, w, keep_master))
    assert_same(ops.dequantize(w), expected)
    x = torch.ones(2, COLS, device=device())
    assert_same(F.linear(x, w), F.linear(x, quantized_alike(plain, w, keep_master)))
    model.reshard()


SHOWN = ("mul_(4)", "merge", "clamp_", "copy_", "one row", "columns")


@pytest.mark.pairwise
@pytest.mark.parametrize("write", SHOWN)
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", FORMATS)
@on_ranks(2)
def test_until_then_it_shows_what_was_written(format, keep_master, write):
    model = make(format, keep_master)
    train(model, steps=1)
    with torch.no_grad():
        check_what_is_shown(model, format, keep_master, write)


# --------------------------------------------------------------- other ways to get there


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "float8_delayed"])
@on_ranks(2)
@torch.no_grad()
def test_a_hook_that_scales_what_forward_reads(format):
    """A pre-forward hook that scales the gathered weight, as adapters do: plain FSDP2 scales what
    this forward reads, and no later one."""
    model, twin = (make(format) for _ in range(2))
    x = batch(0)
    expected = twin(x)
    scaled = []

    def scale(module, args):
        scaled.append(is_quantized(module.weight))
        module.weight.data.mul_(4)

    hook = model[0].register_forward_pre_hook(scale)
    first = model(x)
    hook.remove()
    assert scaled == [True]
    assert torch.allclose(first, 4 * expected, rtol=1e-3, atol=1e-4)
    model.reshard(), twin.reshard()
    assert_same(model(x), expected)


@pytest.mark.parametrize("format", FORMATS)
@on_ranks(4)
@torch.no_grad()
def test_a_write_with_replicas_is_gone_with_reshard(format):
    mesh = full_mesh(2, 2, names=("replicate", "shard"))
    model, twin = (fully_shard(make(format, sharded=False), mesh=mesh) for _ in range(2))
    write_while_gathered(model, "mul_(4)", "linear")
    x = batch(0)
    assert_same(model(x), twin(x))
