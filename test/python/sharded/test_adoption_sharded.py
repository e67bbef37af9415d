"""Which new tensors become shards of a quantized weight: those that fully_shard makes, with rows
and without. Nothing that is done before the first forward changes what is gathered then."""

import copy

import pytest
import torch
from dist_helpers import device, full_mesh, on_ranks, on_worlds, same_on_all_ranks
from helpers import FORMATS, assert_same, fit, is_quantized, ops, value, weight
from models.formats import recipe_of
from models.training import train
from models.weights import check_gathered, full_value, is_dirty, local
from test_shard_windows import chosen
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 90
formats = pytest.mark.parametrize("fmt", FORMATS)
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
few_rows = pytest.mark.parametrize("rows", [1, 3, 64], ids="{} rows".format)
COLS = 100  # of the batches that train() makes


def whole(fmt, keep_master, rows, seed=0):
    """One quantized linear between two plain ones."""
    torch.manual_seed(seed)
    rows = fit(fmt, rows)
    model = nn.Sequential(nn.Linear(COLS, rows, bias=False), nn.Linear(rows, COLS, bias=False))
    model.to(device())
    first = lambda _, name: name == "0"  # noqa: E731
    return qshard.quantize_(model, recipe_of(fmt), filter_fn=first, keep_master=keep_master)


def sharded(fmt, keep_master, rows, seed=0, **kwargs):
    return fully_shard(whole(fmt, keep_master, rows, seed), mesh=full_mesh(), **kwargs)


def check(model, rows_of_values=None):
    """All ranks hold a quantized shard, and what is gathered is of the whole value."""
    shard = local(model[0].weight)
    assert same_on_all_ranks(is_quantized(shard), "quantized")
    values = full_value(model[0].weight) if rows_of_values is None else rows_of_values
    keeps_master = TensorState(shard.detach()).keeps_master()
    assert check_gathered(model, {"0.weight": values} if keeps_master else None) == 1


# ------------------------------------------------------------------------- few rows, many ranks


def looked_at(model):
    """What FSDP2, DCP and users ask of a tensor before its first use."""
    shard = local(model[0].weight)
    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather", "__get_tensor_shard__"):
        hasattr(shard, name)
    repr(shard), shard.shape, shard.stride(), model.state_dict()


@torch.no_grad()
def zeroed(model):
    model[0].weight.mul_(2.0)


@torch.no_grad()
def copied_over(model):
    local(model[0].weight).copy_(value(local(model[0].weight)) * 2)


FIRST = {
    "nothing": lambda model: None,
    "looked at": looked_at,
    "flushed": qshard.flush,
    "written": zeroed,
    "copied over": copied_over,
    "state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "deepcopied": lambda model: copy.deepcopy(model[0].weight),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("first", FIRST)
@few_rows
@keep_or_not
@formats
@on_ranks(4)
def test_few_rows_on_many_ranks(fmt, keep_master, rows, first):
    model, twin = (sharded(fmt, keep_master, rows) for _ in range(2))
    before = full_value(model[0].weight)
    FIRST[first](model)
    if first in ("written", "copied over"):
        before = before * 2
        FIRST[first](twin)
    same_on_all_ranks(is_quantized(local(model[0].weight)), "quantized")
    same_on_all_ranks(is_dirty(model[0].weight), "written")
    assert_same(full_value(model[0].weight), before)
    assert train(model) == train(twin)
    check(model)


# -------------------------------------------------------------------------------- CPU offload


def run_offload(fmt, keep_master, rows, pinned):
    model = sharded(fmt, keep_master, rows, offload_policy=CPUOffloadPolicy(pin_memory=pinned))
    twin = sharded(fmt, keep_master, rows)
    assert same_on_all_ranks(is_quantized(local(model[0].weight)), "quantized")
    assert local(model[0].weight).device.type == "cpu"
    # Without a square root, which MKL does not round correctly on every CPU.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    losses, expected = (train(m, optimizer) for m, optimizer in zip((model, twin), optimizers))
    assert losses == expected
    check(model)


@pytest.mark.pairwise
@pytest.mark.parametrize("pinned", [False, True], ids=["not-pinned", "pinned"])
@few_rows
@keep_or_not
@formats
@on_worlds(2, 4)
def test_offloaded_shards_train_alike(world, fmt, keep_master, rows, pinned):
    if pinned and not torch.cuda.is_available():
        pytest.skip("needs a GPU, for pinned memory")
    world.run(run_offload, fmt, keep_master, rows, pinned)


# ------------------------------------------------------- what happens before the first forward


def assigned(model, donor):
    state = {name: t.detach().clone() for name, t in donor.state_dict().items()}
    model.load_state_dict(state, assign=True)


def loaded(model, donor):
    model.load_state_dict(donor.state_dict())


def run_loaded(fmt, keep_master, rows, assign):
    model, donor = (sharded(fmt, keep_master, rows, seed) for seed in (0, 1))
    expected = full_value(donor[0].weight)
    (assigned if assign else loaded)(model, donor)
    assert_same(full_value(model[0].weight), expected)
    losses = train(model)
    assert losses == train(donor)
    check(model)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@few_rows
@keep_or_not
@on_worlds(2, 4)
def test_a_state_dict_before_the_first_forward(world, keep_master, rows, assign):
    fmt = chosen([f for f in FORMATS if f != "float8_delayed"], keep_master, rows, assign)
    world.run(run_loaded, fmt, keep_master, rows, assign)


def run_optimizer_state(fmt, keep_master, rows, new):
    """States made by the parameter's factories before a forward, as of a resumed optimizer."""
    make = {"zeros_like": torch.zeros_like, "new_zeros": lambda p: p.new_zeros(p.shape)}[new]
    model, twin = (sharded(fmt, keep_master, rows) for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    for own, optimizer, zeros in zip((model, twin), optimizers, (make, plain_zeros)):
        for param in own.parameters():
            states = {name: zeros(param.detach()) for name in ("exp_avg", "exp_avg_sq")}
            same_on_all_ranks(is_quantized(local(states["exp_avg"])), "quantized states")
            optimizer.state[param] = {"step": torch.tensor(1.0), **states}
    losses, expected = (train(m, o) for m, o in zip((model, twin), optimizers))
    assert losses == expected
    for ours, theirs in zip(*(o.state.values() for o in optimizers)):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same(local(ours[name]), local(theirs[name]), name)
    check(model)


def plain_zeros(param):
    zeros = torch.zeros(local(param).shape, device=param.device, dtype=param.dtype)
    return DTensor.from_local(
        zeros,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


@pytest.mark.parametrize("new", ["zeros_like", "new_zeros"])
@few_rows
@keep_or_not
@on_worlds(2, 4)
def test_optimizer_states_before_the_first_forward(world, keep_master, rows, new):
    fmt = chosen(FORMATS, keep_master, rows, new, world.size)
    world.run(run_optimizer_state, fmt, keep_master, rows, new)


# ------------------------------------------------------------ parameters made by new_zeros


class Adapted(nn.Module):
    """A frozen quantized weight and two factors, made by `zeros(weight, shape)`."""

    def __init__(self, base, zeros, r=3):
        super().__init__()
        self.base = nn.Parameter(base, requires_grad=False)
        self.a = nn.Parameter(zeros(base, (r, base.shape[1])))
        self.b = nn.Parameter(zeros(base, (base.shape[0], r)))
        with torch.no_grad():
            self.a.copy_(weight(r, base.shape[1], seed=9) / 8)

    def forward(self, x):
        y = nn.functional.linear(x, self.base)
        return y + nn.functional.linear(nn.functional.linear(x, self.a), self.b)


def adapter_losses(model, steps=5):
    optimizer, losses = torch.optim.AdamW([model.a, model.b], lr=1e-2), []
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, COLS, generator=generator).to(device())
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.pairwise
@keep_or_not
@formats
@on_ranks(2, 4)
def test_adapters_made_by_new_zeros_and_sharded(fmt, keep_master):
    values = weight(COLS if "1x32" not in fmt else 128, COLS).to(device()) / 16
    models = []
    for zeros in (lambda w, s: w.new_zeros(s), lambda w, s: torch.zeros(s, device=w.device)):
        base = ops.quantize(values, fmt, keep_master=keep_master)
        models.append(fully_shard(Adapted(base, zeros), mesh=full_mesh()))
    same_on_all_ranks(is_quantized(local(models[0].a)), "a quantized adapter")
    losses = [adapter_losses(model) for model in models]
    assert losses[0] == losses[1]
    for name in ("a", "b"):
        assert_same(*(local(getattr(model, name)) for model in models), name)


@torch.enable_grad()
def train_with_grad(model):
    train(model, steps=1)


@pytest.mark.pairwise
@few_rows
@keep_or_not
@formats
@on_ranks(4)
@torch.no_grad()
def test_a_parameter_made_by_new_zeros_of_a_dtensor(fmt, keep_master, rows):
    """DTensor.new_zeros as a Parameter: on a rank without rows it is what it is on others."""
    model = sharded(fmt, keep_master, rows)
    train_with_grad(model)
    new = nn.Parameter(model[0].weight.detach().new_zeros(model[0].weight.shape))
    same_on_all_ranks(is_quantized(local(new)), "quantized")
    new.copy_(plain_zeros(model[0].weight) + 2.5)
    same_on_all_ranks(is_quantized(local(new)) and is_dirty(new), "written")
    new.grad = plain_zeros(new) + 1.0
    torch.optim.SGD([new], lr=0.5).step()
    expected = torch.full(new.shape, 2.0, device=device())
    error = (full_value(new) - expected).abs().max()
    assert error <= (0 if keep_master else 0.2), error
    train_with_grad(model)
    check(model)
