"""CPU offload, and models that are built on the meta device."""

import contextlib
import weakref
import zlib

import pytest
import torch
import torch.distributed as dist
from collective_calls import collectives, count
from dist_helpers import device, gather_objects, on_ranks, on_worlds
from helpers import ops
from models.blocks import WIDTH, Model
from models.formats import MIXES, quantize_model
from models.fsdp2 import build, shard
from models.plain_twins import make_plain
from models.training import train
from models.weights import (
    check_gathered,
    different,
    is_dirty,
    local,
    local_values,
    quantized_parameters,
    unsharded,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import distribute_tensor

import qshard
from qshard._runtime.classes import TensorState

# -------------------------------------------------------------------------------- offload


@contextlib.contextmanager
def forced_copies():
    """On CPU, FSDP2's `.to(device, non_blocking=True)` of an offloaded shard returns the shard
    itself. Here it copies, as it does to a GPU; yields the storage bytes of every copy, by plane."""
    stock, sizes = torch.Tensor.to, []

    def to(self, *args, **kwargs):
        result = stock(self, *args, copy=True, **kwargs) if kwargs.get("non_blocking") else None
        if result is None or not ops.is_quantized(result):
            return stock(self, *args, **kwargs)
        sizes.append(TensorState(result).storage_bytes())
        return result

    torch.Tensor.to = to
    try:
        yield sizes
    finally:
        torch.Tensor.to = stock


def offload_policy():
    return CPUOffloadPolicy(pin_memory=device().type == "cuda")


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("rows", [257, 3])
@pytest.mark.parametrize("format", MIXES)
@on_ranks(2, 4)
def test_offload_trains_alike(format, rows, keep_master):
    model = build(format, keep_master=keep_master, rows=rows, offload_policy=offload_policy())
    with forced_copies() as copies:
        losses = train(model)
        checked = check_gathered(model)
    assert checked == 5
    assert len(copies) >= 5 * (2 * 3)
    for copy in copies:
        # The row image crosses; neither masters nor packed storages.
        assert copy["storage"] == copy["image"] and copy["master"] == copy["pending"] == 0, copy
    if device().type == "cpu":
        twin = build(format, keep_master=keep_master, rows=rows)
        assert train(twin) == losses
        assert not different(local_values(model), local_values(twin))


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@on_ranks(2)
def test_offload_flushes_the_original_once(keep_master):
    """(all-reduces of the first and of the second gather after a write outside the optimizer)."""
    model = build("float8_blockwise", keep_master=keep_master, offload_policy=offload_policy())
    counts = []
    with forced_copies():
        train(model, steps=1)
        with torch.no_grad():
            for param in quantized_parameters(model).values():
                param.mul_(1.5)
        for _ in range(2):
            with collectives() as calls, unsharded(model):
                pass
            counts.append(count(calls, "allreduce"))
        check_gathered(model)
    assert counts == [5, 0]


@on_ranks(1, 2)
def test_offload_copies_stay_usable():
    """An image-only copy becomes a whole tensor when its value is asked for, or before the original
    is written or goes: it is a copy of the value at the time, like any other."""
    model = build("float8_blockwise", offload_policy=offload_policy())
    shard = local(model.head.weight).detach()

    def image_copy(tensor):
        copy = tensor.to(device(), non_blocking=True, copy=True)
        assert TensorState(copy).storage_bytes()["master"] == 0
        return copy

    before = ops.master(shard).to(device(), copy=True)
    assert torch.equal(image_copy(shard) + 0, before)
    late, fused = image_copy(shard), image_copy(shard)
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert torch.equal(late + 0, before) and torch.equal(fused + 0, before)
    assert torch.equal(ops.master(shard).to(device()), before * 2)

    original = shard.clone()
    value = ops.master(original).to(device(), copy=True)
    orphan, master = image_copy(original), weakref.ref(original.untyped_storage())
    del original
    assert master() is None  # a copy keeps no master alive
    assert torch.equal(orphan + 0, value)


@on_ranks(2)
def test_shards_are_quantized_where_they_are_offloaded():
    """Quantized after fully_shard, and made plain again: shards stay in the memory of the CPU."""
    torch.manual_seed(0)
    model = shard(Model(format="mix-2").to(device()), offload_policy=offload_policy())
    quantize_model(model, "mix-2")
    assert quantized_parameters(model)
    assert {local(param).device.type for param in model.parameters()} == {"cpu"}
    twin = build("mix-2", offload_policy=offload_policy())
    assert train(model) == train(twin)
    assert not different(local_values(model), local_values(twin))

    later = build("float8_blockwise", offload_policy=offload_policy())
    qshard.dequantize_(later)
    assert {local(param).device.type for param in later.parameters()} == {"cpu"}
    train(later, steps=1)


# ------------------------------------------------------------------------------ meta init


def initialise(model):
    """The same values on any number of ranks."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = torch.randn(param.shape, generator=generator).div(WIDTH**0.5).to(device())
            param.copy_(
                distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
            )


def materialise(model):
    shard(model)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device=device())
    initialise(model)
    return model


def run_meta_init(format, keep_master, rows):
    with torch.device("meta"):
        model = Model(rows, format=format)
    quantize_model(model, format, keep_master=keep_master)
    materialise(model)
    assert len(quantized_parameters(model)) == 5
    values = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    assert check_gathered(model, {n: values[n] for n in quantized_parameters(model)}) == 5
    losses = train(model)
    check_gathered(model)
    if keep_master and device().type == "cpu":
        with torch.device("meta"):
            oracle = make_plain(Model(rows, format=format), format)
        assert train(materialise(oracle)) == losses
        assert not different(local_values(model), local_values(oracle))
    return {name: value.cpu() for name, value in values.items()}


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("rows", [257, 3])
@pytest.mark.parametrize("format", MIXES)
@on_worlds(1, 2, 4)
def test_values_from_the_meta_device_are_the_same_on_all_ranks(world, format, rows, keep_master):
    by_rank = world.run(run_meta_init, format, keep_master, rows)
    assert all(not different(by_rank[0], values) for values in by_rank)


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [257, 3])
@pytest.mark.parametrize("format", MIXES)
@on_ranks(2, 4)
def test_reset_parameters_after_meta_init(format, rows):
    """torch's own reset_parameters: random numbers of each rank's own, on empty shards none."""
    with torch.device("meta"):
        model = Model(rows, format=format)
    shard(quantize_model(model, format)).to_empty(device=device())
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    flags = [is_dirty(param) for param in quantized_parameters(model).values()]
    assert gather_objects(flags) == [[True] * 5] * dist.get_world_size()
    assert check_gathered(model) == 5
    train(model)
    assert check_gathered(model) == 5
