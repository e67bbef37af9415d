"""Optimizers whose step calls that of their base class: torch runs the hooks of a step for that one, too, once
the process has made an optimizer of the base class. It is one step nevertheless, on every rank."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, on_worlds
from torch import nn
from torch.distributed.fsdp import fully_shard

import qshard
from qshard._runtime.classes import TensorState

RECIPES = {
    "delayed": qshard.DelayedScaling(amax_history_len=4, amax_compute_algo="max"),
    "tensorwise": qshard.Float8CurrentScaling(),
}


def optimizers():
    """(a class, one whose step calls the first one's): new ones, so that no test has made any of them."""

    class Base(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(param.grad, alpha=-group["lr"])

    class Clipping(Base):
        fails = False

        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                param.grad.clamp_(-1, 1)
            for _ in range(2):  # as those that correct a prediction
                super().step(closure)
            if self.fails:
                raise KeyError

    return Base, Clipping


def steps(recipe, base_is_used, sharded=False, fails_first=False):
    """Values and states after three steps."""
    Base, Clipping = optimizers()
    if base_is_used:
        Base([nn.Parameter(torch.zeros(1))], lr=1.0)
    torch.manual_seed(0)
    model = qshard.quantize_(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 8)).to(device()), RECIPES[recipe])
    if sharded:
        fully_shard(model)
    optimizer = Clipping(model.parameters(), lr=0.1)
    if fails_first:
        optimizer.fails = True
        model(torch.ones(2, 32, device=device())).sum().backward()
        with pytest.raises(KeyError):
            optimizer.step()
        optimizer.fails = False
        optimizer.zero_grad()
        qshard.flush(model)
    for i in range(3):
        model(torch.full((2, 32), i + 1.0, device=device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = []
    for param in model.parameters():
        local = param.to_local() if sharded else param
        found.append(local.detach() * 1)
        if qshard.is_quantized(param):
            found += TensorState(local).scaling_state().values()
    return [tensor.cpu() for tensor in found]


@pytest.mark.parametrize("fails_first", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@on_worlds(1)
def test_histories_move_once_in_a_step(world, recipe, fails_first):
    (want,) = world.run(steps, recipe, False, fails_first=fails_first)
    (got,) = world.run(steps, recipe, True, fails_first=fails_first)
    assert len(got) == len(want) and all(map(torch.equal, got, want))


def used_on_rank_0(recipe):
    return steps(recipe, dist.get_rank() == 0, sharded=True)


@pytest.mark.parametrize("recipe", RECIPES)
@on_worlds(2)
def test_ranks_meet_though_one_has_used_the_base_class(world, recipe):
    used = world.run(used_on_rank_0, recipe)
    for got, want in zip(used, world.run(steps, recipe, False, sharded=True), strict=True):
        assert all(map(torch.equal, got, want))
