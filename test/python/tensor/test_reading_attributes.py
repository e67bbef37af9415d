"""Looking at a tensor on one rank changes nothing there and starts no collective later."""

import contextlib
import copy
import inspect
import io
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from collective_calls import collectives, count
from dist_helpers import full_mesh, gather_objects, on_ranks, shared_folder
from helpers import ops, weight
from models.formats import MIXES
from models.fsdp2 import build
from models.training import adamw, batch, loss_of, train
from models.weights import check_gathered, is_dirty, local, quantized_parameters
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items

both_masters = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
PROTOCOLS = (
    "__create_chunk_list__",
    "__create_write_items__",
    "__get_tensor_shard__",
    "fsdp_pre_all_gather",
    "fsdp_post_all_gather",
    "__tensor_flatten__",
    "__array_interface__",
    "__cuda_array_interface__",
    "__dlpack__",
)


def look_at(tensor):
    """What hasattr, inspect, copy, debuggers and IDEs do."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in {*dir(tensor), *PROTOCOLS}:
            # Some raise for any real tensor, `imag` among them.
            with contextlib.suppress(Exception):
                repr(getattr(tensor, name))
        with contextlib.suppress(RuntimeError, TypeError):  # as of plain tensors, by torch's version
            inspect.getmembers(tensor)
        inspect.getmembers_static(tensor)
        isinstance(tensor, _Checkpointable)
        copy.copy(tensor)
        repr(tensor), str(tensor), vars(tensor), inspect.getdoc(tensor)


def flags(model):
    return [is_dirty(param) for param in quantized_parameters(model).values()]


def run_looks(format, keep_master, rows, mesh_shape):
    def build_one():
        mesh = full_mesh(*mesh_shape, names=("replicate", "shard")) if mesh_shape else None
        return build(format, keep_master=keep_master, rows=rows, mesh=mesh)

    def steps(model, optimizer, look):
        train(model, optimizer, steps=1)
        if look and dist.get_rank() == 0:
            for param in quantized_parameters(model).values():
                look_at(param)
                look_at(local(param))
                look_at(local(param).detach()[:1])
        assert not any(flags(model))
        with collectives() as calls:
            loss = loss_of(model, batch(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return calls, loss.item()

    model, twin = build_one(), build_one()
    calls, loss = steps(model, adamw(model), look=True)
    twin_calls, twin_loss = steps(twin, adamw(twin), look=False)
    assert loss == twin_loss
    assert count(calls, "allreduce") == count(twin_calls, "allreduce")
    assert len(calls) == len(twin_calls)
    check_gathered(model)


@both_masters
@pytest.mark.parametrize("format", MIXES)
@pytest.mark.parametrize("rows", [257, 1])
@on_ranks(2)
def test_looking_on_one_rank(rows, format, keep_master):
    run_looks(format, keep_master, rows, None)


@on_ranks(4)
def test_looking_on_one_rank_of_a_2d_mesh():
    run_looks("float8_blockwise", True, 3, (2, 2))


# ------------------------------------------------------------------------------- DCP's plans


@pytest.mark.parametrize("rows", [257, 3, 1])
@on_ranks(2, 4)
def test_plans_of_loads_mark_and_those_of_saves_do_not(rows):
    """What a plan of a load lists is what plain DTensors list, and marks; that of a save does not."""
    model = build("float8_blockwise", rows=rows)
    train(model, steps=1)
    for name, param in quantized_parameters(model).items():
        _create_write_items(name, param)
    assert not any(flags(model))
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    assert not any(flags(model))

    for param in quantized_parameters(model).values():
        place = dict(device_mesh=param.device_mesh, placements=param.placements)
        plain = torch.distributed.tensor.zeros(param.shape, **place)
        assert _create_chunk_list(param) == _create_chunk_list(plain)
    assert all(map(all, gather_objects(flags(model))))
    check_gathered(model)


def test_a_plain_load_plan_of_a_tensor_of_one_process():
    q = ops.quantize(weight(20, 32), "float8_blockwise")
    (chunk,) = _create_chunk_list(q)
    assert chunk == _create_chunk_list(weight(20, 32))[0]
    assert not is_dirty(q)


def test_looking_at_tensors_of_one_process():
    for shape in ((20, 32), (2, 32, 16)):
        q = ops.quantize(weight(*shape), "float8_blockwise", keep_master=True)
        for tensor in (q, torch.nn.Parameter(q), q[1:], q.mT):
            look_at(tensor)
        assert not is_dirty(q)
