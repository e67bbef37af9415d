"""Checkpoints of tensor-parallel models are of full plain tensors: they load on any other mesh."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import device, full_mesh, on_ranks, on_worlds, shared_folder
from models.formats import DELAYED, FORMATS, RECIPES
from models.tensor_parallel import (
    Definition,
    build,
    full_value,
    give_gradient,
    initialise,
    local,
    mlp,
)
from test_tensor_parallel_training import batch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 60
DIM, HIDDEN = 96, 160
NAMES = ("dp", "tp")
STOCHASTIC = {"keep_master": False, "stochastic_rounding": True}


def make(kind, format, options):
    """`kind`: the shape of a mesh (dp, tp), "fsdp" without tensor parallelism, or "plain" on each rank."""
    if isinstance(kind, tuple):
        model = build(format, full_mesh(*kind, names=NAMES), DIM, HIDDEN, **options)
    else:
        model = qshard.quantize_(initialise(mlp(DIM, HIDDEN)), RECIPES[format], **options)
        if kind == "fsdp":
            fully_shard(model, mesh=full_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return model, optimizer


def forward_and_step(model, optimizer, step):
    """Activations of one batch, and gradients that no mesh rounds."""
    with torch.no_grad():
        model(batch(step, 0, DIM))
    if isinstance(model, FSDPModule):
        model.reshard()  # the root keeps its parameters after forward
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        give_gradient(param, torch.randn(param.shape, generator=generator).to(device()))
    optimizer.step()
    optimizer.zero_grad()


def facts(model, optimizer):
    """What has to come back, of full tensors."""
    found = []
    for linear in (model.up, model.down):
        weight = linear.weight
        found += [full_value(weight), *(t.clone() for t in TensorState(local(weight)).scaling_state().values())]
        for moment in optimizer.state[weight].values():
            found.append(moment.full_tensor() if isinstance(moment, DTensor) else moment.clone())
    return found


def saved(model, optimizer, folder, is_async, group):
    """The checkpoint is of now, though training goes on while it is written."""
    state = get_state_dict(model, optimizer)
    state = dict(zip(("model", "optimizer"), state))
    if not is_async:
        dcp.save(state, checkpoint_id=folder)
        return facts(model, optimizer)
    want = facts(model, optimizer)
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    forward_and_step(model, optimizer, 7)
    saving.result()
    return want


def loaded(kind, format, options, folder):
    model, optimizer = make(kind, format, options)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    qshard.flush(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    qshard.flush(model)
    return model, optimizer


def are_all(alike, mine, theirs):
    return len(mine) == len(theirs) > 6 and all(map(alike, mine, theirs))


def alike(mine, theirs):
    return torch.allclose(mine, theirs, rtol=1e-3, atol=1e-6)


# (saved on, loaded on, async)
WAYS = [
    ((2, 2), (4, 1), False),
    ((2, 2), (1, 4), True),
    ((2, 2), "fsdp", True),
    ((2, 2), "plain", False),
    ("fsdp", (2, 2), False),
    ("plain", (2, 2), False),
    ((1, 4), (2, 2), True),
]


def run_checkpoints(format, options):
    group = dist.new_group(backend="gloo")
    with shared_folder() as folder:
        for i, (source, target, is_async) in enumerate(WAYS):
            model, optimizer = make(source, format, options)
            for step in range(2):
                forward_and_step(model, optimizer, step)
            want = saved(model, optimizer, folder / str(i), is_async, group)
            resumed, resumed_optimizer = loaded(target, format, options, folder / str(i))
            way = source, target
            assert are_all(torch.equal, facts(resumed, resumed_optimizer), want), way
            if isinstance(target, tuple) and not options and "delayed" not in format:
                tp_mesh = resumed.up.weight.device_mesh["tp"]
                assert Definition(resumed, format, tp_mesh).mismatches(resumed) == 0, way
            if is_async:
                forward_and_step(resumed, resumed_optimizer, 7)
            for each in ((model, optimizer), (resumed, resumed_optimizer)):
                forward_and_step(*each, 8)
            mine, theirs = facts(resumed, resumed_optimizer), facts(model, optimizer)
            # Plain parameters are another loop over elements; histories are of activations, too.
            if "plain" in way or "delayed" in format:
                is_alike = "stochastic_rounding" in options or are_all(alike, mine, theirs)
            else:
                is_alike = are_all(torch.equal, mine, theirs)
            assert is_alike, way
        values = {"up.weight": torch.empty(HIDDEN, DIM), "down.weight": torch.empty(DIM, HIDDEN)}
        dcp.load({"model": values}, checkpoint_id=folder / str(i))
        assert all(map(torch.equal, values.values(), [each.cpu() for each in want[:: len(want) // 2]]))


CASES = {format: (format, {}) for format in ("float8_tensorwise", "float8_blockwise", "nvfp4")}
CASES |= {"delayed": (DELAYED, {}), "stochastic": ("float8_tensorwise", STOCHASTIC)}


@pytest.mark.parametrize("case", CASES)
@on_worlds(4)
def test_dcp_between_meshes(world, case):
    world.run(run_checkpoints, *CASES[case])


@pytest.mark.parametrize("format", FORMATS)
@on_ranks(2)
def test_loads_without_fsdp(format):
    """No all-gather follows that could agree on the full tensor's scale."""
    mesh = full_mesh(1, 2, names=("dp", "tp"))
    dim, hidden = 64, 128
    x = torch.randn(4, dim, generator=torch.Generator().manual_seed(0)).to(device())
    source = build(format, mesh, dim, hidden, order="pq")
    with torch.no_grad():
        for weight in (source.up.weight, source.down.weight):
            weight.mul_(2 + mesh.get_rank())  # each rank's part by another power
    qshard.flush(source)
    want = source(x)
    for order, assign in (("pq", False), ("pq", True), ("meta-pq", False)):
        model = build(format, mesh, dim, hidden, order=order)
        model.load_state_dict(source.state_dict(), assign=assign)
        assert torch.equal(model(x), want), (order, assign)
        assert Definition(model, format, mesh["tp"]).mismatches(model) == 0, (order, assign)
    if format in ("float8_tensorwise", "nvfp4"):
        with torch.no_grad():
            local(model.up.weight).mul_(2)
        message = "qshard::.*this rank's part of a .* Call qshard.flush.model. on all ranks first"
        with pytest.raises(RuntimeError, match=message):
            model(x)
