"""Delayed scaling of weights that stay plain, whose amaxes a group agrees on: its ranks meet in steps and in
qshard.flush, whatever one of them does alone between."""

import gc

import pytest
import torch
import torch.distributed as dist
from collective_calls import collectives, count
from dist_helpers import device, on_ranks
from models.blocks import Branches, Model
from models.formats import DELAYED, quantize_model
from models.training import adamw, batch, loss_of, train
from test_dynamic_optimizers import Partitions, agree_over_ranks, delayed_states
from torch import nn

import qshard


def build(make=Model, **kwargs):
    torch.manual_seed(0)
    return quantize_model(
        make(**kwargs).to(device()), DELAYED, weights="dynamic", group=dist.group.WORLD
    )


def evaluate(model):
    with torch.no_grad():
        model(batch(7, rank=0))
        model(batch(8, rank=0))


def evaluate_and_record(model):
    model(batch(7, rank=0))


def step_another_model(model):
    probe = nn.Linear(4, 4)
    optimizer = adamw(probe)
    for _ in range(2):
        probe(torch.ones(4)).sum().backward()
        optimizer.step()


def save(model):
    names = [name for name in model.state_dict() if "amax" in name]
    assert len(names) == 10


def free_another_model(model):
    """Frees a model of the same group, which the other rank still has."""
    model.others.clear()
    gc.collect()


ALONE = (evaluate, evaluate_and_record, step_another_model, save, free_another_model)


@pytest.mark.parametrize("alone", ALONE)
@on_ranks(2)
def test_one_rank_alone_waits_for_no_other(alone):
    other = build()
    train(other, Partitions(other, dist.get_rank(), 2), steps=1)
    others = [other]
    del other
    model = build()
    model.__dict__["others"] = others
    optimizer = Partitions(model, dist.get_rank(), dist.get_world_size())
    for step in range(3):
        losses = train(model, optimizer, steps=1, first_step=step)
        if dist.get_rank() == 0 and step == 1:
            alone(model)
        dist.barrier()
    model(batch(9, rank=0))
    assert agree_over_ranks(model)
    losses, filled = losses, [int((h[:, 1:] > 0).sum()) for h in delayed_states(model)]
    assert filled == [6] * 5  # of two steps that are kept: weight, input, gradient
    assert losses[-1] < 10


@on_ranks(2)
def test_each_rank_may_use_other_weights():
    """Weights that one rank uses, and another does not."""
    model = build(Branches, parts=[])
    optimizer = Partitions(model, dist.get_rank(), dist.get_world_size())
    for step, parts in enumerate([(1, 0), (0, 2), (2, 1), (1, 1)]):
        model.parts = [parts[dist.get_rank()]]
        loss_of(model, batch(step)).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        with collectives() as calls:
            optimizer.step()
        assert count(calls, "allreduce") == 2  # of gradients and of amaxes
        optimizer.zero_grad()
    model.parts = [2]
    model(batch(9, rank=0))
    qshard.flush(model)
    assert agree_over_ranks(model)


@on_ranks(2)
def test_gradients_after_the_step_of_another_model_are_agreed_on():
    """Another model's step between them: what backward collects after it is agreed on in the next."""
    model, other = build(), nn.Linear(4, 4).to(device())
    optimizer, other_optimizer = Partitions(model, dist.get_rank(), 2), adamw(other)
    for step in range(3):
        loss = loss_of(model, batch(step))
        other(torch.ones(4, device=device())).sum().backward()
        other_optimizer.step()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch(9, rank=0))
    assert agree_over_ranks(model)
    assert [int((h[2, 1:] > 0).sum()) for h in delayed_states(model)] == [2] * 5


@on_ranks(2)
def test_weights_that_an_optimizer_holds():
    """Once an optimizer holds the weights themselves, others' steps are of other models."""
    model = build()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(ddp)
    for step in range(2):
        train(ddp, optimizer, steps=1, first_step=step)
        if dist.get_rank() == 0:
            step_another_model(model)
        dist.barrier()
    assert agree_over_ranks(model)


@on_ranks(2)
def test_when_ranks_meet_does_not_follow_from_what_python_frees():
    """A model of a group has trained, rank 0's Python frees it before rank 1's, and another model steps."""
    model = build()
    loss_of(model, batch(0, rank=0)).backward()
    if dist.get_rank() == 0:
        del model
        gc.collect()
    step_another_model(None)
    words = torch.ones(7, dtype=torch.int32, device=device())
    dist.all_reduce(words)
    assert words.tolist() == [2] * 7
