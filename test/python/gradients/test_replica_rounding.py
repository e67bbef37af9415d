"""Stochastic rounding gives replicas of a weight the same values, whatever seeds their ranks have
when the weights are quantized."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, full_mesh, gather_objects, on_ranks
from helpers import bits, has_two_images, value
from models.formats import FORMATS, RECIPES
from models.training import batch
from models.weights import local, quantized_parameters
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import qshard

BUDGET_S = 75
STOCHASTIC = [f for f in FORMATS if not has_two_images(f)]
formats = pytest.mark.parametrize("format", STOCHASTIC)


def make(format, rows, seed_of_rank, first):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(100, rows, bias=False), nn.GELU(), nn.Linear(rows, 100, bias=False)
    ).to(device())
    if first:
        quantize(model, format, seed_of_rank)
    return model


def quantize(model, format, seed_of_rank):
    if seed_of_rank:
        torch.manual_seed(1234 + dist.get_rank())
    qshard.quantize_(model, RECIPES[format], keep_master=False, stochastic_rounding=True)


def hsdp(model):
    size = dist.get_world_size()
    mesh = full_mesh(2, size // 2, names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def replicated(model):
    return replicate(model, mesh=full_mesh())


WRAPPERS = {
    "hsdp": hsdp,
    "replicate": replicated,
    "ddp": DistributedDataParallel,
    "shards": lambda model: fully_shard(model, mesh=full_mesh()),
}


def train(model, steps=6):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = batch(step)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def rows_of(name, wrapper):
    """Which rank's rows are replicas of this one's."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return {"hsdp": rank % (size // 2), "shards": rank}.get(wrapper, 0)


def run(format, wrapper, rows, seed_of_rank, quantize_first):
    model = make(format, rows, seed_of_rank, quantize_first)
    if quantize_first or wrapper != "ddp":
        model = WRAPPERS[wrapper](model)
    if not quantize_first:
        quantize(model, format, seed_of_rank)
        model = WRAPPERS[wrapper](model) if wrapper == "ddp" else model
    for _ in range(3):
        train(model, steps=2)
        for name, param in quantized_parameters(model).items():
            values = value(local(param))
            replicas = gather_objects((rows_of(name, wrapper), values))
            for which, others in replicas:
                if which == rows_of(name, wrapper):
                    error = (others - values).norm() / values.norm().clamp_min(1e-30)
                    assert torch.equal(bits(others), bits(values)), f"{name}: off by {error:.1%}"


@pytest.mark.pairwise
@pytest.mark.parametrize("quantize_first", [True, False], ids=["quantized first", "wrapped first"])
@pytest.mark.parametrize("seed_of_rank", [True, False], ids=["seeds by rank", "one seed"])
@pytest.mark.parametrize("rows", [3, 133], ids="{} rows".format)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@formats
@on_ranks(2, 4, devices=("cpu",))
def test_replicas_round_alike(format, wrapper, rows, seed_of_rank, quantize_first):
    run(format, wrapper, rows, seed_of_rank, quantize_first)


@pytest.mark.parametrize("wrapper", ["hsdp", "replicate"])
@formats
@on_ranks(2, devices=("cpu",))
def test_replicas_with_seeds_of_their_own(format, wrapper):
    run(format, wrapper, 133, True, True)


@formats
@on_ranks(2, devices=("cpu",))
def test_the_same_seeds_by_rank_give_the_same_losses(format):
    """A copy of the model by rank 0's key is what all have: those of one seed train the same."""
    losses = [train(hsdp(make(format, 133, seeds, True))) for seeds in (True, True)]
    assert losses[0] == losses[1]
