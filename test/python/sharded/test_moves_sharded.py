"""Module.to() and its kin on sharded quantized models, at any time: as plain ones do it. What is cached
about a tensor dies with it; no weak reference to it forbids torch.utils.swap_tensors, by which DTensors
move."""

import weakref

import pytest
import torch
from dist_helpers import on_ranks
from helpers import assert_same, ops
from models.weights import local
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import qshard

BUDGET_S = 60
MOVES = {
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to": lambda m: m.to("cpu", torch.bfloat16),
    "to_empty": lambda m: m.to_empty(device="cpu"),
}
RECIPE = qshard.Float8BlockScaling()


def mlp():
    """On two ranks of uneven rows, on four of none: 33 and 3 rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 33), nn.GELU(), nn.Linear(33, 3))


def with_fsdp(recipe, is_late, **kwargs):
    model = mlp()
    if recipe and not is_late:
        qshard.quantize_(model, recipe, **kwargs)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return qshard.quantize_(model, recipe, **kwargs) if recipe and is_late else model


def with_tp(recipe, is_late, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 6))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return qshard.quantize_(model, recipe, tp_mesh=mesh, **kwargs) if recipe else model


MAKERS = {"fsdp": with_fsdp, "tp": with_tp}


def step(model, dtype=torch.float32):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("is_late", [False, True], ids=["quantized-first", "sharded-first"])
@pytest.mark.parametrize("has_stepped", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("kind", MAKERS)
@on_ranks(2, 4, devices=["cpu"])
@pytest.mark.pairwise
def test_moves_are_those_of_plain_models(kind, move, has_stepped, is_late, keep_master):
    make, move = MAKERS[kind], MOVES[move]
    model, twin = make(RECIPE, is_late, keep_master=keep_master), make(None, is_late)
    if has_stepped:
        step(model)
        step(twin)
        if keep_master:  # so that both have the same values
            with torch.no_grad():
                for p, q in zip(model.parameters(), twin.parameters()):
                    q.copy_(local(p) * 1 if not hasattr(p, "_spec") else p)
    parameters = list(model.parameters())
    before = [local(p).detach() * 1 for p in parameters]
    assert move(model) is model
    move(twin)
    is_empty = move is MOVES["to_empty"]
    for p, q, old, same in zip(model.parameters(), twin.parameters(), before, parameters):
        assert p is same and type(p) is type(q)
        assert (p.dtype, p.device, p.shape) == (q.dtype, q.device, q.shape)
        assert local(p).shape == local(q).shape and local(p).dtype == local(q).dtype
        assert p.placements == q.placements and p.requires_grad == q.requires_grad
        assert ops.is_quantized(local(p)) == (p.dim() > 1)
        if not is_empty and (keep_master or p.dim() == 1):
            assert_same(local(p).detach() * 1, old.to(p.dtype))
    if is_empty:
        for each in (*model.parameters(), *twin.parameters()):
            with torch.no_grad():
                each.fill_(0.25)
    # FSDP2 keeps the dtype that it was given before its first forward, of plain models, too.
    dtype = local(parameters[0]).dtype
    if kind == "tp" or not has_stepped or dtype == torch.float32:
        losses = [step(model, dtype) for _ in range(2)]
        expected = [step(twin, dtype) for _ in range(2)]
        for loss, other in zip(losses, expected):
            torch.testing.assert_close(loss, other, rtol=0.1, atol=0.02)
        assert is_empty or losses[1] < losses[0]


# ----------------------------------------------------------------------- what is kept of tensors


def use(kind):
    if kind == "dynamic":
        model = qshard.quantize_(mlp(), qshard.DelayedScaling(), weights="dynamic")
    elif kind == "ddp":
        model = DistributedDataParallel(qshard.quantize_(mlp(), RECIPE))
    else:
        model = MAKERS[kind](qshard.DelayedScaling(), False)
    for _ in range(2):
        step(model)
    state = model.state_dict()
    qshard.flush(model)
    return model, state


@pytest.mark.parametrize("kind", ["fsdp", "tp", "ddp", "dynamic"])
@on_ranks(2, devices=["cpu"])
def test_nothing_refers_to_parameters(kind):
    model, state = use(kind)
    tensors = [*model.parameters(), *map(local, model.parameters()), *state.values()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            assert weakref.getweakrefcount(tensor) == 0, (kind, type(tensor), tensor.shape)


def sizes_of_tables():
    """The sizes of everything that the package keeps, with what the library brings of it."""
    found = {}
    for name, module in list(__import__("sys").modules.items()):
        if name.startswith("qshard"):
            for attribute, value in vars(module).items():
                value = getattr(value, "known", value)
                if isinstance(value, (dict, list, set)) and not attribute.startswith("__"):
                    found[f"{name}.{attribute}"] = len(value)
    return found


@on_ranks(2, devices=["cpu"])
def test_no_table_grows_with_the_tensors():
    use("fsdp")
    before = sizes_of_tables()
    for _ in range(3):
        use("fsdp")
    after = sizes_of_tables()
    assert before.keys() == after.keys() and before
    # One entry per mesh: torch's caches hold every mesh that there was.
    del before["qshard._runtime.hooks._mesh_groups"], after["qshard._runtime.hooks._mesh_groups"]
    grown = {name: (before[name], size) for name, size in after.items() if size > before[name]}
    assert not grown, grown


def test_a_look_at_a_plain_tensor_leaves_nothing():
    for tensor in (torch.zeros(3), nn.Parameter(torch.zeros(3)), torch.zeros(2, device="meta")):
        assert not hasattr(tensor, "fsdp_pre_all_gather")
        assert not hasattr(tensor, "fsdp_post_all_gather")
        assert weakref.getweakrefcount(tensor) == 0 and not tensor.__dict__
    q = ops.quantize(torch.randn(4, 32), "float8_blockwise")
    assert hasattr(q, "fsdp_pre_all_gather") and weakref.getweakrefcount(q) == 0 and not q.__dict__
    torch.utils.swap_tensors(q, torch.zeros(3))
    assert q.shape == (3,) and not hasattr(q, "fsdp_pre_all_gather")


class Looks(torch.overrides.TorchFunctionMode):
    seen = ()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen = (*self.seen, function)
        return function(*args, **(kwargs or {}))


def test_modes_see_no_looks_of_ours():
    q = ops.quantize(torch.randn(4, 32), "float8_blockwise")
    with Looks() as mode:
        assert hasattr(q, "fsdp_pre_all_gather") and not hasattr(torch.zeros(3), "fsdp_pre_all_gather")
    assert [function.__name__ for function in mode.seen] == ["zeros"]
