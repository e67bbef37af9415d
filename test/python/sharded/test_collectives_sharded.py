"""Collectives on shards and gathered weights, and what torch builds on them: DTensor and full state
dicts."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, full_mesh, on_ranks, on_worlds
from helpers import assert_same, value, weight
from models.blocks import Model
from models.formats import quantize_model
from models.fsdp2 import build, shard
from models.weights import (
    check_gathered,
    different,
    full_value,
    is_dirty,
    local,
    quantized_parameters,
    unsharded,
)
from test_collectives import KINDS
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

ops = torch.ops.qshard
both_masters = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
SHAPES = ((96, 48), (67, 40), (1, 16))  # divisible, uneven, and fewer rows than ranks


def on_rank(kinds, step):
    return list(kinds)[(step + dist.get_rank()) % len(kinds)]


# ---------------------------------------------------------------------- shards and flushes


@both_masters
@on_ranks(2)
def test_a_broadcast_of_written_shards_loses_nothing(keep_master):
    """Written on all ranks and not flushed, then one rank's rows for all: no write is lost, and all
    ranks meet in the flush."""
    rank = dist.get_rank()
    model = build("float8_blockwise", rows=256 * dist.get_world_size(), keep_master=keep_master)
    shards = {n: local(p).detach() for n, p in quantized_parameters(model).items()}
    shards = {n: shard for n, shard in shards.items() if n.endswith("up.weight")}
    assert len(shards) == 2
    for source, shard in enumerate(shards.values()):
        shard.copy_(weight(*shard.shape, seed=rank))
        dist.broadcast(shard, source)
        assert is_dirty(shard)
        assert_same(shard, weight(*shard.shape, seed=source).to(device()))
    check_gathered(model)
    for source, shard in enumerate(shards.values()):
        if keep_master:
            assert_same(shard, weight(*shard.shape, seed=source).to(device()))
    # No rank wrote since, but the ranks cannot know what the others did: all count as written.
    for shard in shards.values():
        dist.broadcast(shard, 0)
        assert is_dirty(shard)
    check_gathered(model)


@both_masters
@on_ranks(2, 3)
def test_empty_shards_count_as_written_too(keep_master):
    """Weights of one row: only rank 0 has rows, and all ranks must meet in the flush."""
    size = dist.get_world_size()
    model = build("mxfp8", rows=1, keep_master=keep_master)
    up = local(model.blocks[0].up.weight).detach()
    down = local(model.blocks[0].down.weight).detach()
    assert len(up) == (dist.get_rank() == 0)
    with unsharded(model):  # FSDP2 says which ranks share a weight
        pass
    for tensor in (up[:0], down[:0]):
        calls = {
            "broadcast": lambda t: dist.broadcast(t, 0),
            "all_reduce": lambda t: dist.all_reduce(t),
            "all_gather": lambda t: dist.all_gather([t] * size, t),
            "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(t, t),
            "scatter": lambda t: dist.scatter(t, None if dist.get_rank() else [t] * size),
        }
        for name, call in calls.items():
            ops.flush([tensor])
            assert not is_dirty(tensor), name
            call(tensor)
            assert is_dirty(tensor), name
    check_gathered(model)


@both_masters
@on_ranks(2)
def test_gathered_weights_send_what_they_show_and_receive(keep_master):
    """Weights between unshard and reshard send what they show, and can receive."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build("float8_blockwise", rows=130, keep_master=keep_master)
    with unsharded(model):
        gathered = model.blocks[0].up.weight.detach()
        shown = ops.dequantize(gathered)
        outputs = torch.empty(size * 130, gathered.shape[1], device=device())
        dist.all_gather_into_tensor(outputs, gathered)
        assert_same(outputs, shown.repeat(size, 1))
        if rank == 0:
            dist.broadcast(gathered, 0)
        else:
            plain = torch.empty_like(shown)
            dist.broadcast(plain, 0)
            assert_same(plain, shown)
        dist.all_reduce(gathered)
        assert_same(gathered, sum([shown] * size))
    check_gathered(model)  # the shards know nothing of it


# ------------------------------------------------------------------------------------- DTensor


def run_distribute_tensor(mesh_shape, placements):
    """Rank 0's tensor, whatever the others hold; their values are not rank 0's."""
    mesh = full_mesh(*mesh_shape)
    for step in range(len(KINDS)):
        for shape in SHAPES:
            rows, cols = shape
            mine = weight(rows, cols, seed=dist.get_rank()).to(device())
            sources = [None]
            tensor = KINDS[on_rank(KINDS, step)](mine)
            if dist.get_rank() == 0:
                sources = [value(tensor).cpu()]
            dist.broadcast_object_list(sources, 0)
            want = sources[0].contiguous().to(device())
            for placed in placements:
                note = f"{shape}, kinds from {step}, {placed}"
                kept = tensor.detach().clone()
                result = distribute_tensor(kept, mesh, placed)
                twin = distribute_tensor(want, mesh, placed)
                assert_same(result.full_tensor(), want, note)
                assert_same(result.to_local(), twin.to_local(), note)
                if dist.get_rank() == 0:
                    assert_same(kept, want, note)
            # The windows themselves, not copies of them: last, since ranks receive into them.
            assert_same(distribute_tensor(tensor, mesh, placements[0]).full_tensor(), want, note)


ONE_D = ([Shard(0)], [Shard(1)], [Replicate()])
TWO_D = (
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Replicate(), Replicate()],
)


@on_ranks(2, 3)
def test_distribute_tensor_keeps_values():
    run_distribute_tensor((dist.get_world_size(),), ONE_D)


@on_ranks(4)
def test_distribute_tensor_on_a_mesh_of_two_dimensions():
    run_distribute_tensor((2, 2), TWO_D)


@on_ranks(2, 3)
def test_redistribute_keeps_values():
    mesh = full_mesh()
    for step in range(len(KINDS)):
        mine = KINDS[on_rank(KINDS, step)](weight(16, 48, seed=dist.get_rank()).to(device()))
        twin = value(mine).contiguous()
        for start in (Shard(0), Shard(1), Partial(), Partial("max")):
            pair = [DTensor.from_local(t, mesh, [start], run_check=False) for t in (mine, twin)]
            for end in (Replicate(), Shard(0), Shard(1)):
                note = f"kinds from {step}, {start} to {end}"
                results = [t.redistribute(placements=[end]).to_local() for t in pair]
                assert_same(*results, note)
            assert_same(*(t.full_tensor() for t in pair), note)


# ----------------------------------------------------------------------------- full state dicts

PLAIN = (None, None)
# (format of the model, whether it keeps masters) of rank 0's unsharded model and of the sharded one
LOADS = (
    (("mix-2", True), ("mix-2", True)),
    (("mix-2", False), ("mix-2", False)),
    (("mix-2", False), ("mix-2", True)),
    (("mix-2", True), ("float8_blockwise", False)),
    (("float8_blockwise", True), ("mix-2", True)),
    (("mix-1", True), ("mix-1", True)),
    (("mix-2", True), PLAIN),
    (("mix-2", False), PLAIN),
    (PLAIN, ("mix-2", True)),
)


def model_of(format, keep_master, rows, seed):
    torch.manual_seed(seed)
    model = Model(rows, format=format).to(device())
    return quantize_model(model, format, keep_master=keep_master) if format else model


def weights_of(state_dict):
    """Without what qshard adds to a model's state_dict."""
    return {n: t for n, t in state_dict.items() if n.endswith((".weight", ".bias"))}


def run_load_of_full_state_dict(source, target, rows, written):
    """From rank 0's unsharded model. `written`: not flushed since."""
    full, values = {}, None
    if dist.get_rank() == 0:
        model = model_of(*source, rows, seed=1)
        if written:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.5)
        full = model.state_dict()
        values = {n: value(t).cpu() for n, t in weights_of(full).items()}
    everywhere = [values]
    dist.broadcast_object_list(everywhere, 0)
    values = {name: tensor.to(device()) for name, tensor in everywhere[0].items()}
    # The state of delayed scaling is there, or wanted, in one of the models only.
    strict = source[0] == target[0]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    for meta in (False, True):
        with torch.device("meta" if meta else device()):
            other = Model(rows, format=target[0])
        if target[0]:
            quantize_model(other, target[0], keep_master=target[1])
        shard(other)
        set_model_state_dict(other, dict(full), options=options)  # torch writes into the dict
        assert len(quantized_parameters(other)) == (5 if target[0] else 0)
        dirty = [is_dirty(p) for p in quantized_parameters(other).values()]
        of_all_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_all_ranks, dirty)
        assert all(flags == dirty for flags in of_all_ranks), f"meta {meta}: {of_all_ranks}"
        loaded = {name: full_value(param) for name, param in other.named_parameters()}
        if target[1] is not False:
            assert not different(loaded, values), f"meta {meta}"
        check_gathered(other, {n: values[n] for n in quantized_parameters(other)})


@on_worlds(2, 3)
def test_full_state_dict_of_an_unsharded_model(world):
    for source, target in LOADS:
        for written in (False, True) if source == target else (True,):
            rows = {2: 257, 3: 2}[world.size]  # uneven, and fewer rows than ranks
            world.run(run_load_of_full_state_dict, source, target, rows, written)
