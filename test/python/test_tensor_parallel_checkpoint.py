"""Checkpoints of tensor-parallel models are of full plain tensors: they load on any other mesh."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_helpers import device, full_mesh, on_worlds, shared_folder
from dist_models import FORMATS
from tp_models import Definition, build, full_value, local, local

import qshard


def values(model):
    return [full_value(model.up.weight), full_value(model.down.weight)]


def run_checkpoint(format, dim, hidden):
    saved_mesh = full_mesh(2, 2, names=("dp", "tp"))
    model = build(format, saved_mesh, dim, hidden)
    want = values(model)
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "model")
        for shape in ((2, 2), (4, 1), (1, 4)):
            mesh = full_mesh(*shape, names=("dp", "tp"))
            loaded = build(format, mesh, dim, hidden)
            with torch.no_grad():
                for param in loaded.parameters():
                    param.mul_(3)
            qshard.flush(loaded)
            dcp.load({"model": loaded.state_dict()}, checkpoint_id=folder / "model")
            qshard.flush(loaded)
            assert all(map(torch.equal, values(loaded), want)), shape
            assert Definition(loaded, format, mesh["tp"]).mismatches(loaded) == 0, shape
        plain = {"up.weight": torch.empty(hidden, dim), "down.weight": torch.empty(dim, hidden)}
        dcp.load({"model": plain}, checkpoint_id=folder / "model")
        assert all(map(torch.equal, plain.values(), [value.cpu() for value in want]))


@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "nvfp4"])
@on_worlds(4)
def test_dcp_between_meshes(world, format):
    world.run(run_checkpoint, format, 96, 160)


def run_loads_without_fsdp(format):
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


@pytest.mark.parametrize("format", FORMATS)
@on_worlds(2)
def test_loads_without_fsdp(world, format):
    world.run(run_loads_without_fsdp, format)
