"""Weights that are quantized at each use, under optimizers that hold others, or copies of the weights: a
step is one step, and no scale is stale."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, on_worlds
from dist_models import DELAYED, Model, adamw, different, local_values, quantize_model, train
from fsdp1_models import BF16, build_fsdp1, different_values, train_fsdp1
from test_delayed_scaling import Container
from test_dynamic_weights import same_states, states
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def zero(model):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def trained(format, make_optimizer, **kwargs):
    torch.manual_seed(0)
    model = DistributedDataParallel(quantize_model(Model(format=format).to(device()), format, **kwargs))
    losses = train(model, make_optimizer(model))
    return losses, model


def agree_over_ranks(model):
    mine = torch.cat([t.flatten() for t in states(model).values()]).to(device())
    both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(both, mine)
    return all(torch.equal(mine, other) for other in both)


# ------------------------------------------------------------------- optimizers within others


def run_zero(format, has_group):
    """Its ranks step other weights each, within a step of all."""
    kwargs = dict(weights="dynamic", group=dist.group.WORLD if has_group else None)
    losses, model = trained(format, zero, **kwargs)
    others, twin = trained(format, adamw, **kwargs)
    assert losses == others and not different(local_values(model), local_values(twin))
    assert same_states(model, twin)
    if has_group:
        assert agree_over_ranks(model)


@pytest.mark.parametrize("has_group", [False, True], ids=["alone", "group"])
@pytest.mark.parametrize("format", [DELAYED, "mix-1"])
@on_worlds(2)
def test_zero_redundancy_optimizer_steps_once(world, format, has_group):
    world.run(run_zero, format, has_group)


def run_container(has_group):
    kwargs = dict(weights="dynamic", group=dist.group.WORLD if has_group else None)
    losses, model = trained(DELAYED, lambda model: Container(model.parameters()), **kwargs)
    others, twin = trained(DELAYED, adamw, **kwargs)
    assert losses == others and same_states(model, twin)
    _, model = trained(DELAYED, lambda model: Container(model.parameters(), pull=0.5), **kwargs)
    histories = [m.dynamic.state[0] for m in model.modules() if getattr(m, "dynamic", None)]
    assert [int((h[:, 1:] > 0).sum()) for h in histories] == [6] * 5  # what it writes rolls nothing


@pytest.mark.parametrize("has_group", [False, True], ids=["alone", "group"])
@on_worlds(2)
def test_a_step_within_a_step_is_one_step(world, has_group):
    world.run(run_container, has_group)


def train_by_container(model, pull=0.0):
    container = Container((p for p in model.parameters() if p.requires_grad), pull)
    return train_fsdp1(model, optimizer=container)


def run_container_of_fsdp1(format, use_orig_params):
    kwargs = dict(use_orig_params=use_orig_params, mixed_precision=BF16)
    model, twin = build_fsdp1(format, **kwargs), build_fsdp1(format, **kwargs)
    assert train_by_container(model) == train_fsdp1(twin)
    assert not different_values(model, twin)
    for a, b in zip(delayed_states(model), delayed_states(twin), strict=True):
        assert torch.equal(a, b)
    other = build_fsdp1(format, **kwargs)
    train_by_container(other, pull=0.5)
    for a, b in zip(delayed_states(other), delayed_states(twin), strict=True):
        assert a.count_nonzero() == b.count_nonzero()


def delayed_states(model):
    dynamics = [getattr(m, "dynamic", None) for m in model.modules()]
    return [d.state[0] for d in dynamics if d is not None and d.state]


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("format", [DELAYED, "mix-1"])
@on_worlds(2)
def test_a_step_within_a_step_of_fsdp1_is_one_step(world, format, use_orig_params):
    world.run(run_container_of_fsdp1, format, use_orig_params)
