"""Copies into shards, of which each rank decides by its rows whether codes come along: whatever each
has decided, all ranks enter the same collectives next, and agree on scales and histories."""

import copy
import io

import pytest
import torch
from collective_calls import collectives
from dist_helpers import device, full_mesh, gather_objects, on_ranks
from helpers import FORMATS, assert_same, ops, value
from models.weights import check_gathered, full_value, local
from test_shard_windows import Holder, chosen, step
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 180
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
SHAPES = ((1, 64), (3, 64), (5, 48), (130, 64))
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))

COPIES = {
    "rows": lambda p, q: p[:2].copy_(q[:2]),
    "a clone of rows": lambda p, q: p[:2].copy_(q[:2].clone()),
    "half": lambda p, q: p[: len(p) // 2].copy_(q[: len(q) // 2]),
    "no rows": lambda p, q: p[:0].copy_(q[:0]),
    "the rows after": lambda p, q: p[:-1].copy_(q[1:]),
    "the last row": lambda p, q: p[-1:].copy_(q[-1:]),
    "one row for all": lambda p, q: p.copy_(q[:1]),
    "columns": lambda p, q: p[:, :32].copy_(q[:, :32]),
    "a clone of columns": lambda p, q: p[:, :32].copy_(q[:, :32].clone()),
    "plain rows": lambda p, q: p[:2].copy_(value(q)[:2]),
    "all": lambda p, q: p.copy_(q),
    "all, then rows": lambda p, q: p.copy_(q)[:2].copy_(q[:2].clone() * 3),
    "rows, then all": lambda p, q: (p[:2].copy_(q[:2].clone()), p.copy_(q)),
}
SOURCES = {
    "another model": None,
    "a clone": lambda p: p.clone(),
    "a written clone": lambda p: p.clone().mul_(3),
    "new_zeros": lambda p: p.new_zeros(p.shape),
    "empty_like, copied": lambda p: torch.empty_like(p).copy_(p),
}
BEFORE = ("fresh", "trained", "written")
NEXT = {
    "step": lambda model: step(model),
    "gather": lambda model: (model.unshard(), model.reshard()),
    "flush": lambda model: qshard.flush(model),
}


def make(fmt, keep_master, shape, seed=0, trained=False, mesh=None):
    model = fully_shard(Holder(fmt, keep_master, shape, seed), mesh=mesh or full_mesh())
    for _ in range(1 + seed if trained else 0):
        step(model)
    return model


def shared_state(model):
    """What the format of a weight remembers, without what this rank has seen since its last step."""
    state = {name: t.clone() for name, t in TensorState(local(model.weight).detach()).scaling_state().items()}
    if "amax_history" in state:
        state["amax_history"][:, 0] = 0
    return {name: t.tolist() for name, t in state.items()}


def check_together(model, run):
    """All ranks enter the same collectives, and have the same scaling state afterwards."""
    with collectives() as calls:
        run(model)
    by_rank = gather_objects([(name, str(sizes)) for name, sizes in calls])
    assert all(calls == by_rank[0] for calls in by_rank), by_rank
    states = gather_objects(shared_state(model))
    assert all(state == states[0] for state in states), states
    return [name for name, _ in by_rank[0]]


def check_values(model, keep_master, expected):
    if keep_master:
        assert_same(local(model.weight), expected)
        assert check_gathered(model, {"weight": full_value(model.weight)}) == 1
    else:
        assert check_gathered(model) == 1


@torch.no_grad()
def run_copy(keep_master, shape, copied, source, before, mesh=None):
    names = keep_master, shape, copied, source, before
    fmt = chosen(FORMATS, *names)
    model = make(fmt, keep_master, shape, trained=before != "fresh", mesh=mesh)
    p = local(model.weight).detach()
    if source == "another model":
        other = make(fmt, keep_master, shape, seed=1, trained=before == "trained", mesh=mesh)
        q = local(other.weight).detach()
    else:
        q = SOURCES[source](p)
    twin, twin_source = value(p), value(q)
    if before == "written":
        p.mul_(1.5), twin.mul_(1.5)
    COPIES[copied](p, q), COPIES[copied](twin, twin_source)
    assert_same(p, twin)
    after = chosen(NEXT, *names)
    check_together(model, NEXT[after])
    check_values(model, keep_master, twin - 0.125 if after == "step" else twin)
    assert "allreduce" not in check_together(model, NEXT["gather"]), "they have met"
    check_together(model, step)


def run_copies(keep_master, shape, copied, mesh=None):
    if mesh:
        mesh = full_mesh(*mesh, names=("replicate", "shard"))
    for source in SOURCES:
        before = chosen(BEFORE, keep_master, shape, copied, source)
        run_copy(keep_master, shape, copied, source, before, mesh)


@pytest.mark.pairwise
@pytest.mark.parametrize("copied", COPIES)
@shapes
@keep_or_not
@on_ranks(2, 4)
def test_ranks_enter_the_same_collectives_after_a_copy(keep_master, shape, copied):
    run_copies(keep_master, shape, copied)


@pytest.mark.pairwise
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 64)], ids=["1x64", "3x64"])
@keep_or_not
@on_ranks(4)
def test_so_do_the_ranks_of_replicas(keep_master, shape, copied):
    run_copies(keep_master, shape, copied, mesh=(2, 2))


HISTORY_COPIES = {
    "one row": lambda p, q: p[:1].copy_(q[:1]),
    "all but one": lambda p, q: p[1:].copy_(q[1:]),
    "all": lambda p, q: p.copy_(q),
}


@pytest.mark.parametrize("copied", HISTORY_COPIES)
@keep_or_not
@on_ranks(4)
@torch.no_grad()
def test_histories_are_the_same_on_all_ranks(keep_master, copied):
    """Ranks of 2, 2, 1 and 0 rows: some copy all that they have, which takes over histories, too."""
    model, other = (make("float8_delayed", keep_master, (5, 48), seed, True) for seed in (0, 1))
    own, source = shared_state(model), shared_state(other)
    assert own != source
    HISTORY_COPIES[copied](local(model.weight).detach(), local(other.weight).detach())
    check_together(model, NEXT["gather"])
    kept = shared_state(model)["amax_history"]
    assert kept == (source if copied == "all" else own)["amax_history"]
    check_together(model, step)
    assert check_gathered(model) == 1


# ------------------------------------------------------------------- what is made of the shard next


def full_state(model):
    return {"weight": torch.ones_like(full_value(model.weight))}


def load_full(model):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full_state(model), options=options)
    return model


def load(model, **kwargs):
    model.load_state_dict(model.state_dict(), **kwargs)
    return model


MADE = {
    "set_model_state_dict": load_full,
    "load_state_dict": load,
    "load_state_dict, assigned": lambda model: load(model, assign=True),
    "cast": lambda model: model.to(torch.bfloat16),
    "cast twice": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "clone": lambda model: replaced(model, lambda p: p.clone()),
    "deepcopy": lambda model: replaced(model, copy.deepcopy),
    "to": lambda model: replaced(model, lambda p: p.to(p.device, copy=True)),
    "pickle": lambda model: replaced(model, pickled),
}


def pickled(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def replaced(model, make_tensor):
    """The parameter's local tensor becomes another one, as code does that swaps weights."""
    model.weight._local_tensor = make_tensor(local(model.weight).detach())
    return model


@torch.no_grad()
def run_made(keep_master, shape, copied, made):
    fmt = chosen(FORMATS, keep_master, shape, copied, made)
    model, other = (make(fmt, keep_master, shape, seed, trained=True) for seed in (0, 1))
    p, q = (local(m.weight).detach() for m in (model, other))
    COPIES[copied](p, q)
    model = MADE[made](model)
    check_together(model, NEXT[chosen(NEXT, keep_master, copied, shape)])
    check_together(model, step)
    assert check_gathered(model) == 1


@pytest.mark.pairwise
@pytest.mark.parametrize("copied", ["rows", "a clone of rows", "columns", "all"])
@shapes
@keep_or_not
@on_ranks(2, 4)
def test_what_is_made_of_a_shard_after_a_copy(keep_master, shape, copied):
    for made in MADE:
        run_made(keep_master, shape, copied, made)


@pytest.mark.pairwise
@pytest.mark.parametrize("copied", ["rows", "columns", "all"])
@pytest.mark.parametrize("rows", [1, 3, 130])
@keep_or_not
@on_ranks(2, 4)
@torch.no_grad()
def test_sharding_after_a_copy(keep_master, rows, copied):
    fmt = chosen(FORMATS, keep_master, rows, copied)
    model, other = (Holder(fmt, keep_master, (rows, 64), seed).to(device()) for seed in (0, 1))
    COPIES[copied](model.weight.detach(), other.weight.detach())
    fully_shard(model, mesh=full_mesh())
    check_together(model, NEXT[chosen(NEXT, fmt, rows, copied)])
    assert check_gathered(model) == 1


# -------------------------------------------------------------------------- what it costs, and when


@keep_or_not
@on_ranks(4)
@torch.no_grad()
def test_ranks_ask_once(keep_master):
    """A copy of all rows keeps their codes: ranks ask one another once whether it wrote anything."""
    model, other = (make("nvfp4", keep_master, (5, 48), seed) for seed in (0, 1))
    for holder in (model, other):
        assert check_gathered(holder) == 1
    local(model.weight).copy_(local(other.weight))
    gathers = [check_together(model, NEXT["gather"]) for _ in range(2)]
    assert [names.count("allreduce") for names in gathers] == [1, 0]
    codes = [ops.codes(local(m.weight)) for m in (model, other)]
    assert_same(*codes)


class CopyingSGD(torch.optim.SGD):
    """Writes its parameters by copy_(), as optimizers in Python do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(param - group["lr"] * param.grad)


@keep_or_not
@on_ranks(2)
@torch.no_grad()
def test_steps_that_copy_ask_nothing(keep_master):
    counts = []
    for optimizer in (torch.optim.SGD, CopyingSGD):
        model = make("float8_blockwise", keep_master, (5, 48))
        param = model.weight
        param.grad = torch.zeros_like(param)
        step_of = optimizer([param], lr=0.5).step
        step_of()
        counts.append(check_together(model, lambda model: (step_of(), NEXT["gather"](model))))
    assert counts[0] == counts[1], counts
    assert counts[0].count("allreduce") == 1, counts
