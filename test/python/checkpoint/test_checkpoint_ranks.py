"""Low-bit checkpoints and saved scales of a model on some ranks of the world: the others are not asked."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, on_worlds, shared_folder
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import qshard
from qshard.checkpoint import load_quantized, save_quantized

ops = torch.ops.qshard
# Ranks of a mesh: not the first ones, and of two dimensions, for which torch has no group.
MESHES = {"line": [0, 2], "square": [[1, 2], [0, 3]]}


def build(mesh, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(200, 130), nn.Linear(130, 9, bias=False)).to(device())
    model = qshard.quantize_(model, qshard.Float8BlockScaling(), keep_master=False)
    return fully_shard(model, mesh=mesh)


def assert_same(model, other):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        a, b = a.to_local().detach(), b.to_local().detach()
        assert torch.equal(a * 1, b * 1)
        if ops.is_quantized(a):
            assert torch.equal(ops.scale_inv(a), ops.scale_inv(b))


def save_and_load(model, other, folder):
    save_quantized(model, folder, layout="deepseek-fp8")
    load_quantized(other, folder)
    assert_same(model, other)


def keep_scales(model, other, folder):
    other.load_state_dict(model.state_dict())
    saved = qshard.QuantizationState(model, scales=True).state_dict()
    qshard.QuantizationState(other, scales=True).load_state_dict(saved)
    assert_same(model, other)


def run_on_a_part(program, ranks):
    names = ("replicate", "shard")[2 - torch.tensor(ranks).dim() :]
    mesh = DeviceMesh(device().type, ranks, mesh_dim_names=names)  # all ranks make its groups
    with shared_folder() as folder:
        if dist.get_rank() in torch.tensor(ranks):
            program(build(mesh), build(mesh, seed=1), folder)
        else:
            model = nn.Linear(4, 4, bias=False)
            model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
            with pytest.raises(ValueError, match="save_quantized: the model is on a mesh of other ranks"):
                save_quantized(model, folder, layout="deepseek-fp8")
        dist.barrier()


def know_other_groups(model, other, folder):
    if dist.get_rank() == 4:
        dist.new_group([4], use_local_synchronization=True)
    keep_scales(model, other, folder)


@on_worlds(5)
def test_ranks_of_a_square_know_other_numbers_of_groups(world):
    """torch's names of groups count them; a world has made none of these ranks before."""
    world.run(run_on_a_part, know_other_groups, [[4, 2], [1, 3]])


@pytest.mark.parametrize("program", [save_and_load, keep_scales])
@pytest.mark.parametrize("kind", MESHES)
@on_worlds(5)
def test_a_mesh_is_a_part_of_the_world(world, kind, program):
    if program is save_and_load:
        pytest.importorskip("safetensors", reason="needs safetensors")
    world.run(run_on_a_part, program, MESHES[kind])
