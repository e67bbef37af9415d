"""quantize_ keeps the parameters: optimizers, averages and wrappers that held them go on with quantized ones."""

import copy
import weakref

import pytest
import torch
from dist_helpers import full_mesh, on_ranks
from helpers import value
from models.blocks import Model
from models.formats import FORMATS, RECIPES
from models.training import adamw, train
from models.weights import different, local_values
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import qshard

RECIPE = qshard.Float8BlockScaling()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8))


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(7, 32, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def one_step_then_quantize(make_optimizer, optimizer_first):
    """The model and its optimizer, of one plain step and three quantized ones."""
    model = mlp()
    optimizer = make_optimizer(model.parameters())
    step(model, optimizer, 0)
    if not optimizer_first:
        state = copy.deepcopy(optimizer.state_dict())
    qshard.quantize_(model, RECIPE)
    if not optimizer_first:
        optimizer = make_optimizer(model.parameters())
        optimizer.load_state_dict(state)
    for seed in range(1, 4):
        step(model, optimizer, seed)
    return model


@pytest.mark.parametrize("fused", [dict(fused=True), dict(foreach=True), dict(foreach=False)], ids=str)
def test_an_optimizer_made_and_used_before_goes_on(fused):
    make = lambda params: torch.optim.AdamW(params, lr=1e-2, **fused)  # noqa: E731
    first, second = (one_step_then_quantize(make, first) for first in (True, False))
    for a, b in zip(first.parameters(), second.parameters()):
        assert qshard.is_quantized(a) == qshard.is_quantized(b)
        assert torch.equal(value(a), value(b))


def test_parameters_stay_with_gradients_hooks_and_attributes():
    model, calls = mlp(), []
    weight = model[0].weight
    weight.note = "mine"
    removed = weight.register_hook(lambda grad: calls.append("never"))
    weight.register_hook(lambda grad: calls.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda param: calls.append(param is weight))
    removed_after = weight.register_post_accumulate_grad_hook(lambda param: calls.append("never"))
    model(torch.randn(3, 32)).sum().backward()
    grad = weight.grad
    qshard.quantize_(model, RECIPE)
    assert model[0].weight is weight and qshard.is_quantized(weight) and weight.is_leaf
    assert weight.grad is grad and weight.note == "mine"
    calls.clear()
    removed.remove()
    removed_after.remove()
    model(torch.randn(3, 32)).sum().backward()
    assert calls == ["hook", True]


def test_an_average_made_before_follows():
    model = mlp()
    ema = torch.optim.swa_utils.AveragedModel(model)
    ema.update_parameters(model)
    qshard.quantize_(model, RECIPE)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    ema.update_parameters(model)
    assert not qshard.is_quantized(ema.module[0].weight)
    expected = mlp()[0].weight.detach().lerp(value(model[0].weight), 0.5)
    assert torch.allclose(ema.module[0].weight, expected, rtol=0, atol=1e-7)


def in_a_living_graph(model):
    return model(torch.randn(3, 32)).sum()


def weakly_referenced(model):
    return weakref.ref(model[2].weight)


@pytest.mark.parametrize(
    "held,match",
    [
        (in_a_living_graph, "graph of an output that is still alive.*del loss"),
        (weakly_referenced, "weak reference to 2.weight"),
    ],
    ids=["graph", "weak-reference"],
)
def test_what_cannot_be_kept_changes_nothing(held, match):
    model = mlp()
    holder = held(model)
    with pytest.raises(RuntimeError, match=match):
        qshard.quantize_(model, RECIPE)
    assert not any(qshard.is_quantized(p) for p in model.parameters())
    assert type(model[0]) is nn.Linear
    del holder
    qshard.quantize_(model, RECIPE)


@on_ranks(2, devices=("cpu",))
def test_distributed_data_parallel_comes_after():
    model = mlp()
    ddp = DistributedDataParallel(model)
    for target in (ddp, model):
        with pytest.raises(RuntimeError, match="call quantize_ before"):
            qshard.quantize_(target, RECIPE)
    assert not any(qshard.is_quantized(p) for p in model.parameters())


# ------------------------------------------------------------------------------------ FSDP2


def trained(format, order, keep_master):
    torch.manual_seed(0)
    model = Model(48, format=format)
    optimizer = None
    for word in order.split():
        if word == "quantize":
            params = [id(p) for p in model.parameters()]
            qshard.quantize_(model, RECIPES[format], keep_master=keep_master)
            assert [id(p) for p in model.parameters()] == params
        elif word == "shard":
            for block in model.blocks:
                fully_shard(block, mesh=full_mesh())
            fully_shard(model, mesh=full_mesh())
        else:
            optimizer = adamw(model)
    losses = train(model, optimizer=optimizer)
    return losses, local_values(model)


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", [f for f in FORMATS if f != "mxfp8_1x32"])
@on_ranks(2, 3)
def test_fully_shard_optimizer_and_quantize_in_any_order(format, keep_master):
    expected, values = trained(format, "quantize shard optimizer", keep_master)
    for order in ("shard quantize optimizer", "shard optimizer quantize"):
        losses, others = trained(format, order, keep_master)
        assert losses == expected, order
        assert not different(values, others), order
