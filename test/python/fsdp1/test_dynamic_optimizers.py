"""Weights that are quantized at each use, under optimizers that hold others, or copies of the weights: a
step is one step, and no scale is stale."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from collective_calls import collectives, count
from dist_helpers import device, on_ranks
from helpers import pickled
from models.blocks import Branches, Model
from models.formats import DELAYED, FORMATS, quantize_model
from models.fsdp1 import BF16, build_fsdp1, different_values, train_fsdp1
from models.training import adamw, batch, loss_of, train
from models.weights import different, local_values
from test_delayed_scaling import Container
from test_dynamic_weights import (
    EXTRA,
    Mlp,
    Tied,
    inputs,
    pair,
    same,
    same_states,
    states,
    steps,
)
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import qshard
from qshard.module_state import dynamics_of

BUDGET_S = 45


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


@pytest.mark.parametrize("has_group", [False, True], ids=["alone", "group"])
@pytest.mark.parametrize("format", [DELAYED, "mix-1"])
@on_ranks(2)
def test_zero_redundancy_optimizer_steps_once(format, has_group):
    """Its ranks step other weights each, within a step of all."""
    kwargs = dict(weights="dynamic", group=dist.group.WORLD if has_group else None)
    losses, model = trained(format, zero, **kwargs)
    others, twin = trained(format, adamw, **kwargs)
    assert losses == others and not different(local_values(model), local_values(twin))
    assert same_states(model, twin)
    if has_group:
        assert agree_over_ranks(model)


@pytest.mark.parametrize("has_group", [False, True], ids=["alone", "group"])
@on_ranks(2)
def test_a_step_within_a_step_is_one_step(has_group):
    kwargs = dict(weights="dynamic", group=dist.group.WORLD if has_group else None)
    losses, model = trained(DELAYED, lambda model: Container(model.parameters()), **kwargs)
    others, twin = trained(DELAYED, adamw, **kwargs)
    assert losses == others and same_states(model, twin)
    _, model = trained(DELAYED, lambda model: Container(model.parameters(), pull=0.5), **kwargs)
    histories = [dynamic.state[0] for _, dynamic in dynamics_of(model)]
    assert [int((h[:, 1:] > 0).sum()) for h in histories] == [6] * 5  # what it writes rolls nothing


def train_by_container(model, pull=0.0):
    container = Container((p for p in model.parameters() if p.requires_grad), pull)
    return train_fsdp1(model, optimizer=container)


def delayed_states(model):
    return [d.state[0] for _, d in dynamics_of(model) if d.state]


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("format", [DELAYED, "mix-1"])
@on_ranks(2)
def test_a_step_within_a_step_of_fsdp1_is_one_step(format, use_orig_params):
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


# -------------------------------------------------------------------- optimizers in backward


def same_delayed_states(model, twin):
    return all(torch.equal(a, b) for a, b in zip(delayed_states(model), delayed_states(twin), strict=True))


@pytest.mark.parametrize("format,strategy", [
    (DELAYED, "FULL_SHARD"), ("mix-1", "FULL_SHARD"), ("float8_blockwise", "FULL_SHARD"),
    (DELAYED, "HYBRID_SHARD"),
])
@on_ranks(4)
def test_optimizers_in_backward_of_fsdp1(format, strategy):
    """FSDP1 steps a parameter on the ranks that have a part of it, as soon as its gradient is reduced."""
    kwargs = dict(strategy=strategy, mixed_precision=BF16)
    model, twin = build_fsdp1(format, **kwargs), build_fsdp1(format, **kwargs)
    _apply_optimizer_in_backward(torch.optim.AdamW, list(model.parameters()), {"lr": 1e-2})
    losses = []
    for step in range(3):
        losses.append(loss_of(model, batch(step)))
        with collectives() as calls:
            losses[-1].backward()
        assert count(calls, "allreduce") == (0 if strategy == "FULL_SHARD" else 3)  # of gradients
    assert [loss.item() for loss in losses] == train_fsdp1(twin)
    for is_after_step in (True, False):  # once for all units; replicas meet after steps
        with torch.no_grad(), collectives() as calls:
            loss = loss_of(model, batch(9))
        assert count(calls, "allreduce") == (2 if strategy == "HYBRID_SHARD" and is_after_step else 1)
    with torch.no_grad():
        assert torch.equal(loss, loss_of(twin, batch(9)))
    assert not different_values(model, twin) and same_delayed_states(model, twin)
    for m in (model, twin):
        loss_of(m, batch(3)).backward()
    adamw(twin).step()  # of other moments
    histories = [{n: t for n, t in m.state_dict().items() if "history" in n} for m in (model, twin)]
    assert all(torch.equal(histories[0][n][1:], histories[1][n][1:]) for n in histories[0])


# ------------------------------------------------------------------- weights without a gradient


@on_ranks(2)
def test_histories_of_a_group_roll_where_there_is_a_gradient():
    """DDP leaves a weight that no rank used without a gradient. Without DDP one rank may have one alone."""
    models = []
    for weights in ("quantized", "dynamic"):
        torch.manual_seed(0)
        group = dict(group=dist.group.WORLD) if weights == "dynamic" else {}
        model = quantize_model(Branches([]).to(device()), DELAYED, weights=weights, **group)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step, part in enumerate([1, 0, 2, 0, 1]):
            model.parts = [part]
            loss_of(ddp, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert same_states(*models)
    model.parts = [2 if dist.get_rank() else 1]
    loss_of(model, batch(9)).backward()
    optimizer.step()
    assert agree_over_ranks(model)


# ------------------------------------------------------------------- optimizers over copies


class Partitions:
    """What DeepSpeed's ZeRO does: parameters are views of a flat buffer, by `.data`, and each rank's
    optimizer holds an fp32 copy of a part of it, which goes back after the step. Neither versions nor
    addresses of the parameters tell."""

    def __init__(self, model, rank=0, ranks=1, **kwargs):
        self.params = list(model.parameters())
        numels = [p.numel() for p in self.params]
        self.ranks, self.size = ranks, -(-sum(numels) // ranks)
        self.flat = torch.zeros(self.size * ranks, dtype=self.params[0].dtype, device=device())
        self.own = slice(rank * self.size, (rank + 1) * self.size)
        for part, param in zip(self.flat[: sum(numels)].split(numels), self.params):
            part.copy_(param.detach().flatten())
            param.data = part.view_as(param)
        self.copy = self.flat[self.own].float().requires_grad_()
        self.optimizer = torch.optim.AdamW([self.copy], lr=1e-2, **kwargs)

    def reduce(self):
        grads = torch.cat([p.grad.flatten() for p in self.params])
        if self.ranks > 1:
            dist.all_reduce(grads.div_(self.ranks))
        grads = nn.functional.pad(grads, (0, self.flat.numel() - grads.numel()))
        self.copy.grad = grads[self.own].float()

    def step(self):
        self.reduce()
        self.optimizer.step()
        self.spread()

    def spread(self):
        own = self.copy.detach().to(self.flat.dtype)
        if self.ranks > 1:
            dist.all_gather_into_tensor(self.flat, own)
        else:
            self.flat.copy_(own)

    def zero_grad(self):
        for param in self.params:
            param.grad = None


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("format", [*FORMATS, *(r.format for r in EXTRA)])
def test_copies_of_a_flat_buffer_train_as_quantized_parameters(format, microbatches, recompute):
    quantized, plain = pair(format, make=lambda format: Mlp(format, recompute))
    optimizers = adamw(quantized), Partitions(plain)
    for step in range(4):
        kwargs = dict(first=step, microbatches=microbatches)
        a, b = (steps(m, o, 1, **kwargs) for m, o in zip((quantized, plain), optimizers))
        assert not same(a, b), step
        x = inputs(99)
        with torch.no_grad():
            assert torch.equal(quantized(x), plain(x))
        assert format != DELAYED or same_states(quantized, plain)


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_copies_of_models_between_the_step_and_a_use(way):
    quantized, plain = pair(DELAYED)
    for model, optimizer in (quantized, adamw(quantized)), (plain, Partitions(plain)):
        steps(model, optimizer, 3)
    other = way(plain)
    x = inputs(99)
    assert torch.equal(quantized(x), other(x)) and same_states(quantized, other)
    assert torch.equal(quantized(x), plain(x)) and same_states(quantized, plain)


def test_scales_are_of_what_a_flat_buffer_holds():
    """Between steps: loads, averages, whatever writes it."""
    _, plain = pair(DELAYED)
    optimizer = Partitions(plain)
    for step in range(3):
        steps(plain, optimizer, 1, first=step)
        plain(inputs(0))
        optimizer.flat.mul_(100)
        for layer in plain.up, plain.down:
            x = torch.eye(layer.in_features)
            bias = 0 if layer.bias is None else layer.bias
            want = layer.weight.detach().t()
            assert torch.allclose(layer(x) - bias, want, rtol=0.07, atol=1e-3 * float(want.abs().max()))
        optimizer.flat.div_(100)


def test_codes_of_tied_weights_are_not_of_an_earlier_step():
    """One of three uses of a forward leaves them for the others."""
    quantized, plain = pair("float8_blockwise", make=Tied)
    optimizer, tokens = Partitions(plain), torch.arange(24)
    plain.embedding(tokens)
    plain(tokens).sum().backward()
    before = plain.embedding(tokens).detach()
    optimizer.step()
    assert not torch.equal(plain.embedding(tokens), before)


def test_skipped_steps_of_copies_roll_no_history():
    _, plain = pair(DELAYED)
    optimizer = Partitions(plain, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen = []
    for factor in 1.0, float("inf"), 1.0:
        scaler.scale(plain(inputs(0)).square().mean() * factor).backward()
        optimizer.reduce()
        scaler.step(optimizer.optimizer)
        scaler.update()
        optimizer.spread()
        optimizer.zero_grad()
        seen.append([table[0] for name, table in states(plain).items() if "history" in name])
    rolled = [any(not torch.equal(a, b) for a, b in zip(x, y)) for x, y in zip(seen, seen[1:])]
    assert rolled == [False, True]


@pytest.mark.parametrize("has_copies", [False, True], ids=["itself", "copies"])
def test_steps_of_other_models_roll_nothing(has_copies):
    quantized, plain = pair(DELAYED)
    optimizers = adamw(quantized), Partitions(plain) if has_copies else adamw(plain)
    other = nn.Linear(4, 4)
    other_optimizer = adamw(other)
    for step in range(4):
        other(torch.ones(4)).sum().backward()
        other_optimizer.step()
        a, b = (steps(m, o, 1, first=step) for m, o in zip((quantized, plain), optimizers))
        assert not same(a, b) and same_states(quantized, plain)


def test_flushes_of_compiled_models_roll_histories():
    torch._dynamo.reset()
    quantized, plain = pair(DELAYED)
    plain.compile(fullgraph=True, backend="aot_eager")
    optimizers = adamw(quantized), Partitions(plain)
    for step in range(4):
        a, b = (steps(m, o, 1, first=step) for m, o in zip((quantized, plain), optimizers))
        qshard.flush(plain)
        assert not same(a, b) and same_states(quantized, plain), step


def plain_values(model):
    return {name: value * 1 for name, value in local_values(model).items()}


@pytest.mark.parametrize("is_flushed", [False, True], ids=["at-uses", "flushed"])
@pytest.mark.parametrize("format", [DELAYED, "mix-2"])
@on_ranks(2)
def test_partitions_of_copies(format, is_flushed):
    """As DDP of quantized parameters; histories agree over the group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    others, twin = trained(format, adamw)
    torch.manual_seed(0)
    kwargs = dict(weights="dynamic", group=dist.group.WORLD)
    model = quantize_model(Model(format=format).to(device()), format, **kwargs)
    optimizer, losses = Partitions(model, rank, ranks), []
    for step in range(3):
        losses += train(model, optimizer, steps=1, first_step=step)
        if is_flushed:
            with collectives() as calls:
                qshard.flush(model)
            assert count(calls, "allreduce") == 1
    if not is_flushed:
        with torch.no_grad():
            model(batch(0, rank=0))
    assert agree_over_ranks(model)
    if device().type == "cpu":
        assert losses == others
        assert not different(local_values(model), plain_values(twin.module))
        assert format != DELAYED or not is_flushed or same_states(model, twin.module)
    assert losses[-1] < losses[0]


# -------------------------------------------------------------------------- copies of a model


@on_ranks(2)
def test_a_copy_on_one_rank_waits_for_no_other_rank():
    """An average of weights, say, evaluated by one rank while others go on."""
    kwargs = dict(weights="dynamic", group=dist.group.WORLD)
    torch.manual_seed(0)
    model = quantize_model(Model().to(device()), DELAYED, **kwargs)
    ddp, other = DistributedDataParallel(model), nn.Linear(4, 4)
    train(ddp, steps=2)
    average = copy.deepcopy(model)
    optimizer, x = adamw(other), batch(0, rank=0)
    other(torch.ones(4)).sum().backward()
    optimizer.step()
    before = states(model)
    if dist.get_rank() == 0:
        with torch.no_grad():
            average(x)
            average(x)
        pickle.loads(pickle.dumps(average))(x)
    assert all(torch.equal(before[name], table) for name, table in states(model).items())
    assert agree_over_ranks(model)
    assert [int((h[:, 1:] > 0).sum()) for h in delayed_states(model)] == [6] * 5
