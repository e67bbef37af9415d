"""accelerate with FSDP2: quantize_ before and after prepare, clipping, save_state and load_state."""

import contextlib
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from client_models import RECIPES, batch, llama
from dist_helpers import on_worlds, shared_folder
from dist_models import different, local_values

import qshard


@contextlib.contextmanager
def accelerator(efficient=False):
    """An Accelerator whose prepare() uses FSDP2. It refuses to on CPUs, so its state is told."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, FSDP_VERSION="2")
    with mock.patch.dict(os.environ, variables, MASTER_ADDR="127.0.0.1", MASTER_PORT="0"):
        AcceleratorState._reset_state(reset_partial_state=True)
        made = Accelerator(cpu=True)
        made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=efficient,
        )
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        try:
            yield made
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def prepared(made, recipe, order, seed=0, **kwargs):
    model = llama(seed=seed)
    if order == "quantize prepare":
        qshard.quantize_(model, RECIPES[recipe], **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = made.prepare(model, optimizer)
    if order == "prepare quantize":
        qshard.quantize_(model, RECIPES[recipe], **kwargs)
    return model, optimizer


def train(made, model, optimizer, steps):
    losses = []
    for number in steps:
        loss = model(**batch(2 * number + dist.get_rank())).loss
        made.backward(loss)
        norm = made.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), float(norm)))
    return losses


def run(recipe, keep_master, efficient):
    values = []
    # accelerate's prepare maps parameters by address, which weights without a master have not.
    orders = ("quantize prepare", "prepare quantize")[0 if keep_master else 1 :]
    for order in orders:
        with accelerator(efficient) as made, shared_folder() as folder:
            assert made.is_fsdp2
            model, optimizer = prepared(made, recipe, order, keep_master=keep_master)
            losses = train(made, model, optimizer, range(2))
            made.save_state(str(folder))
            losses += train(made, model, optimizer, range(2, 4))
            values.append((losses, local_values(model)))
            made.load_state(str(folder))
            assert train(made, model, optimizer, range(2, 4)) == losses[2:]
            assert not different(values[-1][1], local_values(model))
    assert values[0][0] == values[-1][0]
    assert not different(values[0][1], values[-1][1])


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("recipe", ["float8_blockwise", "float8_delayed"])
@pytest.mark.parametrize("efficient", [False, True], ids=["", "cpu_ram_efficient_loading"])
@on_worlds(2, devices=("cpu",))
def test_prepare_save_state_and_load_state(world, recipe, keep_master, efficient):
    world.run(run, recipe, keep_master, efficient)
