"""A state_dict under fully_shard holds DTensors of plain values, which torch.save writes and anybody reads.
They are the weights: what is written into them is seen on every rank. assign=True copies."""

import subprocess
import sys

import pytest
import torch
from dist_helpers import device, full_mesh, on_ranks, shared_folder
from helpers import assert_same, is_quantized
from models.training import train
from models.weights import check_gathered, full_value, local
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 75
RECIPES = {
    "float8_rowwise": qshard.Float8RowwiseScaling(),
    "float8_blockwise": qshard.Float8BlockScaling(),
    "nvfp4": qshard.NVFP4BlockScaling(),
    "float8_delayed": qshard.DelayedScaling(amax_history_len=4),
}
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
formats = pytest.mark.parametrize("recipe", RECIPES)
few_rows = pytest.mark.parametrize("rows", [3, 64], ids="{} rows".format)

# Reads a rank's file where the library is not installed, by a mesh of the file's size.
READER = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

files = sys.argv[1:]
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=len(files))
for file in files:
    state = torch.load(file, weights_only=False)
    for name, value in state.items():
        local = value.to_local() if hasattr(value, "to_local") else value
        assert type(local) is torch.Tensor and local.dtype in (torch.float32, torch.int64)
    values = {n: (v.to_local() if hasattr(v, "to_local") else v) + 0 for n, v in state.items()}
    torch.save(values, file + ".plain")
assert not any("qshard" in name for name in sys.modules)
"""


def sharded(recipe, keep_master, rows=64, seed=0, **kwargs):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(100, rows, bias=False), nn.Linear(rows, 100, bias=False)).to(device())
    fully_shard(model, mesh=full_mesh())
    return qshard.quantize_(model, RECIPES[recipe], keep_master=keep_master, filter_fn=lambda *_: True)


@pytest.mark.each_value
@formats
@keep_or_not
@on_ranks(1, 2)
def test_torch_save_writes_plain_values(keep_master, recipe):
    model = sharded(recipe, keep_master, 3)
    train(model)
    state = model.state_dict()
    with shared_folder() as folder:
        ranks = torch.distributed.get_world_size()
        files = [str(folder / f"{rank}.pt") for rank in range(ranks)]
        torch.save(state, files[torch.distributed.get_rank()])
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            done = subprocess.run(
                [sys.executable, "-c", READER, *files], capture_output=True, text=True, timeout=240
            )
            assert done.returncode == 0, done.stderr[-2000:]
        torch.distributed.barrier()
        read = torch.load(files[torch.distributed.get_rank()] + ".plain", weights_only=True)
    for name, value in model.state_dict().items():
        assert_same(read[name].cpu(), (local(value) + 0).cpu(), name)


@pytest.mark.each_value
@formats
@keep_or_not
@few_rows
@on_ranks(2, 4)
def test_what_is_written_into_it_is_written_into_the_weights(rows, keep_master, recipe):
    model = sharded(recipe, keep_master, rows)
    train(model)
    state, before = model.state_dict(), full_value(model[0].weight)
    weight = state["0.weight"]
    assert isinstance(weight, DTensor) and weight.placements == model[0].weight.placements
    assert TensorState(local(weight)).is_export()
    assert_same(full_value(weight), before)
    if keep_master:
        assert local(weight).data_ptr() == local(model[0].weight).data_ptr()
    with torch.no_grad():
        weight.mul_(2)
    assert_same(full_value(model[0].weight), before * 2)
    assert check_gathered(model, {n: full_value(p) for n, p in model.named_parameters()} if keep_master else None) == 2
    train(model)


@pytest.mark.each_value
@formats
@keep_or_not
@few_rows
@on_ranks(2, 4)
def test_assigned_it_is_copied(rows, keep_master, recipe):
    model, other = (sharded(recipe, keep_master, rows, seed) for seed in (0, 1))
    train(model)
    other.load_state_dict(model.state_dict(), assign=True)
    own = local(other[0].weight)
    assert is_quantized(own) and not TensorState(own.detach()).is_export()
    assert TensorState(own.detach()).keeps_master() == keep_master
    assert_same(full_value(other[0].weight), full_value(model[0].weight))
    assert train(model) == train(other)
    before = full_value(other[0].weight)
    with torch.no_grad():
        model[0].weight.mul_(2)  # not of this one
    qshard.flush(model)
    assert_same(full_value(other[0].weight), before)
