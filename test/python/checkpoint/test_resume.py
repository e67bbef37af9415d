"""Resuming through set_state_dict, which makes an optimizer step of its own after the model was loaded:
what formats remember between steps (histories, counts) is what it was."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import device, on_worlds, shared_folder
from models.blocks import Model
from models.formats import RECIPES
from models.fsdp2 import shard
from models.training import adamw, train
from models.weights import different, local_values
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import qshard
from qshard._runtime.classes import TensorState

WAYS = ("dcp", "full", "one-after-the-other")


def make(format, stochastic, wrap):
    torch.manual_seed(0)
    model = Model(33, format=format)
    kwargs = dict(keep_master=False, stochastic_rounding=True) if stochastic else {}
    qshard.quantize_(model, RECIPES[format], **kwargs)
    if wrap == "fsdp2":
        shard(model)
    else:
        model.to(device())
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    return model, adamw(model)


def states(model):
    return {
        f"{name}_{state}": tensor.clone()
        for name, param in model.named_parameters()
        if qshard.is_quantized(param)
        for state, tensor in TensorState(getattr(param, "_local_tensor", param)).scaling_state().items()
    }


def load(model, optimizer, way, folder):
    if way == "dcp":
        model_state, optimizer_state = get_state_dict(model, optimizer)
        saved = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            model, optimizer,
            model_state_dict=saved["model"], optim_state_dict=saved["optimizer"],
        )
        return
    saved = torch.load(folder / "full.pt", weights_only=True)
    options = StateDictOptions(full_state_dict=True)
    if way == "full":
        set_state_dict(
            model, optimizer,
            model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=options,
        )
    else:  # the optimizer's own step comes after a flush of what was loaded
        set_model_state_dict(model, saved["model"], options=options)
        qshard.flush(model)
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)


def run(format, stochastic, wrap, way):
    model, optimizer = make(format, stochastic, wrap)
    train(model, optimizer, steps=2)
    with shared_folder() as folder:
        if way == "dcp":
            state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
        else:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state, optimizer_state = get_state_dict(model, optimizer, options=options)
            if dist.get_rank() == 0:
                torch.save({"model": state, "optimizer": optimizer_state}, folder / "full.pt")
            dist.barrier()
        resumed, resumed_optimizer = make(format, stochastic, wrap)
        with torch.no_grad():
            for param in resumed.parameters():
                param.mul_(-3)
        load(resumed, resumed_optimizer, way, folder)
    qshard.flush(resumed)
    before = states(model)
    assert before and not different(before, states(resumed))
    assert not different(local_values(model), local_values(resumed))
    losses = train(model, optimizer, steps=3, first_step=2)
    assert train(resumed, resumed_optimizer, steps=3, first_step=2) == losses
    assert not different(states(model), states(resumed))
    assert not different(local_values(model), local_values(resumed))
    assert different(before, states(model))


CASES = [
    (format, stochastic, wrap)
    for format, stochastic in (
        ("float8_delayed[history=3]", False),
        ("float8_delayed[history=3]", True),
        ("float8_blockwise", True),
        ("mxfp8", True),
    )
    for wrap in ("alone", "ddp", "fsdp2")
]


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format,stochastic,wrap", CASES)
@on_worlds(2)
def test_resumed_training_is_bit_for_bit_the_same(world, format, stochastic, wrap, way):
    if wrap == "alone":
        world = type(world)(world.device, 1)
    world.run(run, format, stochastic, wrap, way)
