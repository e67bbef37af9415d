"""Checkpoints hold plain tensors: any number of ranks, plain models and plain PyTorch read them."""

import copy
import hashlib
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import World, device, on_ranks, on_worlds, shared_folder
from helpers import ops
from models.blocks import Model
from models.formats import MIXES, quantize_model
from models.fsdp2 import build, build_oracle, shard
from models.training import adamw, batch, loss_of, train
from models.weights import (
    check_gathered,
    check_same,
    different,
    full_value,
    is_dirty,
    local,
    local_values,
    quantized_parameters,
    unsharded,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 90
ROWS = [257, 3]
both_masters = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
mixes = pytest.mark.parametrize("format", MIXES)


def full_values(model):
    return {name: full_value(param) for name, param in model.named_parameters()}


def digest(tensors):
    """One string for the bits of all tensors."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode() + tensors[name].cpu().contiguous().clone().numpy().tobytes())
    return sha.hexdigest()


def fresh(format, keep_master, rows):
    """A model whose weights are others than those of any checkpoint."""
    model = build(format, keep_master=keep_master, rows=rows)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(-3)
    return model


def gathered_values(model):
    """What forward sees."""
    with unsharded(model):
        return {n: ops.dequantize(p.detach()) for n, p in quantized_parameters(model).items()}


# ------------------------------------------------------------------- any number of ranks


def train_and_save(folder, format, keep_master, rows):
    model = build(format, keep_master=keep_master, rows=rows)
    train(model, steps=2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return digest(full_values(model)), digest(gathered_values(model))


def load_and_save(source, target, format, keep_master, rows):
    model = fresh(format, keep_master, rows)
    dcp.load({"model": model.state_dict()}, checkpoint_id=source)
    dcp.save({"model": model.state_dict()}, checkpoint_id=target)
    return digest(full_values(model)), digest(gathered_values(model))


@pytest.mark.pairwise
@both_masters
@mixes
@pytest.mark.parametrize("rows", ROWS)
@on_worlds(4, 2)
def test_resharding_keeps_every_bit(world, rows, format, keep_master, tmp_path):
    seen = world.run(train_and_save, str(tmp_path / "0"), format, keep_master, rows)
    for i, size in enumerate((2, 3, 1) if world.size == 4 else (1, 2)):
        args = (str(tmp_path / str(i)), str(tmp_path / str(i + 1)), format, keep_master, rows)
        seen += World(world.device, size).run(load_and_save, *args)
    assert len(set(seen)) == 1


@pytest.mark.pairwise
@both_masters
@mixes
@on_ranks(1, 2, 3)
def test_resumed_training_is_the_same(format, keep_master):
    """Two steps, a checkpoint, two more: on a resumed model they are the same."""
    model = build(format, keep_master=keep_master)
    optimizer = adamw(model)
    train(model, optimizer, steps=2)
    with shared_folder() as folder:
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
        losses = train(model, optimizer, steps=2, first_step=2)

        resumed = fresh(format, keep_master, 257)
        resumed_optimizer = adamw(resumed)
        state, optimizer_state = get_state_dict(resumed, resumed_optimizer)
        saved = {"model": state, "optimizer": optimizer_state}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            resumed,
            resumed_optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
    assert train(resumed, resumed_optimizer, steps=2, first_step=2) == losses
    check_same(local_values(model), local_values(resumed))


@pytest.mark.pairwise
@both_masters
@mixes
@pytest.mark.parametrize("rows", ROWS)
@on_ranks(1, 2, 4)
def test_in_place_load(rows, format, keep_master):
    """A load into the model that is training, then its next forward."""
    model = build(format, keep_master=keep_master, rows=rows)
    train(model, steps=1)
    values, seen = full_values(model), gathered_values(model)
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        train(model, steps=2)
        assert different(values, full_values(model))
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    # Ranks without rows were written nothing; all must know that a flush is due.
    assert all(is_dirty(param) for param in quantized_parameters(model).values())
    loss_of(model, batch(9)).backward()
    check_same(seen, gathered_values(model))
    check_same(values, full_values(model))


@pytest.mark.pairwise
@both_masters
@mixes
@on_ranks(2)
def test_save_of_a_pending_write(format, keep_master):
    """A write that no flush has reached is in the checkpoint, unrounded."""
    model = build(format, keep_master=keep_master)
    train(model, steps=1)
    with torch.no_grad():
        for param in quantized_parameters(model).values():
            param.mul_(1.1)
    want = local_values(model)
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        assert all(is_dirty(p) for p in quantized_parameters(model).values())
        oracle = build_oracle(format)
        dcp.load({"model": oracle.state_dict()}, checkpoint_id=folder)
    check_same(local_values(oracle), want)
    check_gathered(model, full_values(oracle))


# ------------------------------------------------------------------------------------ async


@pytest.mark.pairwise
@both_masters
@mixes
@pytest.mark.parametrize("rows", ROWS)
@on_ranks(1, 2, 4)
def test_async_save_while_training(rows, format, keep_master):
    model = build(format, keep_master=keep_master, rows=rows)
    optimizer = adamw(model)
    train(model, optimizer, steps=1)
    # The checkpoint's collectives run beside those of training: they need a group of their own.
    group = dist.new_group(backend="gloo")
    with shared_folder() as folder:
        for step in (1, 2):
            values = full_values(model)
            state = {"model": model.state_dict()}
            dcp.save(state, checkpoint_id=folder / f"sync{step}")
            saving = dcp.async_save(
                state, checkpoint_id=folder / f"async{step}", process_group=group
            )
            train(model, optimizer, steps=1, first_step=step)
            saving.result()
            assert different(values, full_values(model))
            for kind in ("sync", "async"):
                oracle = build_oracle(format, rows=rows)
                dcp.load({"model": oracle.state_dict()}, checkpoint_id=folder / f"{kind}{step}")
                assert not different(values, full_values(oracle)), kind


# ----------------------------------------------------------------------------- plain PyTorch

PLAIN_READER = """
    import sys
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = sys.argv[1]
    want = torch.load(f"{folder}/values.pt", weights_only=True)
    model = {name: torch.full_like(value, -1.0) for name, value in want.items()}
    dcp.load({"model": model}, checkpoint_id=f"{folder}/dcp", no_dist=True)
    for name, value in want.items():
        assert model[name].dtype == value.dtype and torch.equal(model[name], value), name

    dcp_to_torch_save(f"{folder}/dcp", f"{folder}/converted.pt")
    converted = torch.load(f"{folder}/converted.pt", weights_only=True)["model"]
    for name, value in want.items():
        assert type(converted[name]) is torch.Tensor and torch.equal(converted[name], value), name

    assert "qshard" not in sys.modules and "libqshard" not in open("/proc/self/maps").read()
    print("read", len(want))
"""


def save_for_plain_reader(folder, format, keep_master, rows, dtype):
    torch.manual_seed(0)
    model = Model(rows, format=format).to(device(), dtype)
    shard(quantize_model(model, format, keep_master=keep_master))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.7)
    values = {name: value.cpu() for name, value in full_values(model).items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    if dist.get_rank() == 0:
        torch.save(values, f"{folder}/values.pt")


@pytest.mark.pairwise
@both_masters
@mixes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_worlds(2)
def test_plain_pytorch_reads_the_checkpoint(world, dtype, format, keep_master, tmp_path):
    world.run(save_for_plain_reader, str(tmp_path), format, keep_master, 257, dtype)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "QSHARD_LIBRARY")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PLAIN_READER), str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "read 11\n"


@pytest.mark.pairwise
@both_masters
@mixes
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(1, 2, 4)
def test_plain_checkpoint_into_quantized_model_and_back(dtype, rows, format, keep_master):
    """A plain checkpoint into a quantized model, and that one's back into a plain model."""
    plain = build_oracle(format, rows=rows).to(dtype)
    train(plain, steps=1) if dtype == torch.float32 else None
    values = full_values(plain)
    model, back = fresh(format, keep_master, rows), build_oracle(format, rows=rows)
    with shared_folder() as folder:
        dcp.save({"model": plain.state_dict()}, checkpoint_id=folder / "plain")
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "plain")
        wide = {name: value.float() for name, value in values.items()}
        check_same(full_values(model), wide)
        check_gathered(model, wide)
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "quantized")
        dcp.load({"model": back.state_dict()}, checkpoint_id=folder / "quantized")
    check_same(full_values(back), full_values(model))
    if keep_master:
        check_same(full_values(back), wide)


# ------------------------------------------------------------------- full state dicts


@pytest.mark.pairwise
@both_masters
@mixes
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("meta", [True, False], ids=["meta", "allocated"])
@on_ranks(1, 2, 4)
def test_full_state_dict_broadcast_from_rank_0(meta, rows, format, keep_master):
    model = build(format, keep_master=keep_master, rows=rows)
    train(model, steps=1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        assert len(full) == 13  # two of them are the state of delayed scaling
        # On one rank DTensor.full_tensor() is the shard itself, whatever its kind.
        assert dist.get_world_size() == 1 or not any(map(ops.is_quantized, full.values()))

    with torch.device("meta" if meta else device()):
        other = Model(rows, format=format)
    shard(quantize_model(other, format, keep_master=keep_master))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full, options=options)
    assert len(quantized_parameters(other)) == 5
    check_same(full_values(other), full_values(model))
    check_gathered(other, full_values(model) if keep_master else None)
    check_same(gathered_values(other), gathered_values(model))
    train(other, steps=1)
    check_gathered(other)


@pytest.mark.pairwise
@both_masters
@mixes
@pytest.mark.parametrize("rows", ROWS)
@on_ranks(2, 4)
def test_load_state_dict(rows, format, keep_master):
    model, other = (build(format, keep_master=keep_master, rows=rows) for _ in range(2))
    train(model, steps=2)
    other.load_state_dict(model.state_dict())
    check_gathered(other, full_values(model) if keep_master else None)
    check_same(full_values(other), full_values(model))


# --------------------------------------------------------------- shards, exactly as they are


def planes(tensor):
    """(packed bytes, pending update, layout, format). What needs no other rank is flushed first:
    copies do so, pickling does not. Whose share the rows are is left out: a clone's are no rank's."""
    is_alone = dist.get_world_size() == 1
    if is_alone:
        ops.codes(tensor.detach())
    packed, pending, (*layout, _adopted), format, _ = TensorState(tensor.detach()).pack()
    if is_alone:  # what a shard of delayed scaling keeps for the flush of the next step is in the codes
        pending = None
    return packed, torch.empty(0) if pending is None else pending, layout, format


def same_planes(tensor, other):
    ours, theirs = planes(tensor), planes(other)
    return torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1]) and (
        ours[2:] == theirs[2:]
    )


@pytest.mark.pairwise
@both_masters
@mixes
@pytest.mark.parametrize("written", [True, False], ids=["written", "flushed"])
@pytest.mark.parametrize("rows", ROWS)
@on_ranks(1, 2, 4)
def test_pickled_and_copied_shards(rows, written, format, keep_master):
    model = build(format, keep_master=keep_master, rows=rows)
    train(model, steps=1)
    if written:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.1)
    shards = {n: local(p).detach() for n, p in quantized_parameters(model).items()}
    with shared_folder() as folder:
        path = folder / f"rank{dist.get_rank()}.pt"
        torch.save(shards, path)
        loaded = torch.load(path, weights_only=True)
    copied = copy.deepcopy(model.state_dict())
    for name, tensor in shards.items():
        for other in (loaded[name], copied[name]._local_tensor, copy.deepcopy(tensor), tensor.clone()):
            assert same_planes(tensor, other), name

    # A copy lives on: the pending update is quantized where the copy is used.
    values = full_values(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(copied)
    check_same(full_values(model), values)
    # One rank quantized what was written where codes were read.
    is_written = written and dist.get_world_size() > 1
    check_gathered(model, values if keep_master or is_written else None)
