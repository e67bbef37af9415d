"""Batches, optimizers and training runs, and how far gradients are apart."""

import contextlib

import torch
import torch.distributed as dist
from dist_helpers import device
from models.blocks import WIDTH
from models.weights import local


def batch(step, microbatch=0, rank=None, dtype=torch.float32):
    """This rank's input, the same on any device."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank + 1)
    # Reentrant activation checkpointing trains only what comes after an input with a gradient.
    return torch.randn(16, WIDTH, generator=generator).to(device(), dtype).requires_grad_()


def adamw(model, **kwargs):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, **kwargs)


def loss_of(model, x):
    return (model(x) - x).float().square().mean()


def train(model, optimizer=None, *, steps=3, first_step=0, microbatches=1, synced=True, resharded=True):
    """This rank's losses. `synced`: reduce every microbatch's gradients; `resharded`: free the
    gathered weights after every microbatch's backward."""

    def prepare(last):
        if not resharded:
            model.set_reshard_after_backward(last)
        if not synced:
            model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    return train_within(prepare, model, optimizer, range(first_step, first_step + steps), microbatches)


def train_within(context_of, model, optimizer, steps, microbatches):
    """Losses of steps whose forward and backward run in context_of(whether the microbatch is the step's last)."""
    optimizer, losses = optimizer or adamw(model), []
    for step in steps:
        for microbatch in range(microbatches):
            with context_of(microbatch == microbatches - 1):
                loss = loss_of(model, batch(step, microbatch)) / microbatches
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_by_sgd(model, steps, features, growth=0):
    """Losses of a model on a batch of its own for each step; inputs grow by `growth` a step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(6, features, generator=torch.Generator().manual_seed(step))
        loss = model((x * (1 + growth * step)).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Relative, of a model's gradients that were reduced in few bits.
REDUCTION_ERROR = {"float8": 0.04, "mxfp8": 0.04, "nvfp4": 0.14}


def gradients(model):
    return {name: local(p.grad) * 1 for name, p in model.named_parameters()}


def relative_error(got, want):
    """The relative error of all gradients of a model, over all ranks."""
    sums = torch.zeros(2)
    for name in want:
        sums[0] += (got[name].double() - want[name].double()).square().sum().item()
        sums[1] += want[name].double().square().sum().item()
    dist.all_reduce(sums := sums.to(device()))
    return (sums[0] / sums[1]).sqrt().item()
