"""Replicas: DistributedDataParallel, FSDP2's replicate() and ZeroRedundancyOptimizer. All ranks hold the same
weights and see other inputs."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collective_calls import collectives
from dist_helpers import device, full_mesh, on_ranks
from helpers import ops
from models.blocks import Model
from models.formats import DELAYED, FORMATS, RECIPES, quantize_model
from models.fsdp2 import shard
from models.plain_twins import make_plain
from models.training import adamw, batch, loss_of, train, train_within
from models.weights import (
    check_gathered,
    different,
    image_bytes,
    local,
    local_values,
    quantized_parameters,
)
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from qshard._runtime import hooks
import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 60


def build(format, prepare=quantize_model, model_type=Model, seed=0, **kwargs):
    torch.manual_seed(seed)
    return prepare(model_type(format=format).to(device()), format, **kwargs)


def states(model):
    """What the formats of the weights remember."""
    return {
        f"{name}_{state}": tensor.clone()
        for name, param in quantized_parameters(model).items()
        for state, tensor in TensorState(local(param)).scaling_state().items()
    }


def check_is_same_on_all_ranks(model):
    named = {name: ops.codes(local(p).detach()).float() for name, p in quantized_parameters(model).items()}
    for name, tensor in {**named, **states(model), **local_values(model)}.items():
        first = tensor.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, tensor), name


# ------------------------------------------------------------------------------------- DDP


class Sometimes(Model):
    """The second block is used by some ranks only, and by none in every third forward."""

    forwards = 0

    def forward(self, x):
        self.forwards += 1
        x = self.blocks[0](x)
        if self.forwards % 3 and (self.forwards + dist.get_rank()) % 2:
            x = self.blocks[1](x)
        return self.head(x)


OPTIONS = {
    "stock": {},
    "bucket-views": {"gradient_as_bucket_view": True},
    "static-graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def train_ddp(model, microbatches, optimizer=None):
    """As train(), gradients of all but the last microbatch under no_sync."""

    def synced_if_last(last):
        # A static graph is that of a backward that reduces.
        return contextlib.nullcontext() if model.static_graph or last else model.no_sync()

    return train_within(synced_if_last, model, optimizer, range(3), microbatches)


@pytest.mark.parametrize("microbatches", (1, 2))
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.each_value
@on_ranks(2)  # sums of more have an order, which is that of buckets
def test_ddp_trains_as_with_plain_weights(format, option, microbatches):
    def ddp(prepare):
        model_type = Sometimes if option == "unused" else Model
        model = build(format, prepare, model_type)
        return DistributedDataParallel(model, bucket_cap_mb=0.1, **OPTIONS[option])

    model = ddp(quantize_model)
    losses = train_ddp(model, microbatches)
    check_is_same_on_all_ranks(model)
    assert check_gathered(model) > 0
    # The oracle sees steps by their values in the forward that follows, which may leave a weight out.
    if device().type == "cpu" and not (option == "unused" and "delayed" in format):
        oracle = ddp(make_plain)
        assert train_ddp(oracle, microbatches) == losses
        assert not different(local_values(model), local_values(oracle))


@pytest.mark.parametrize("keep_master", (True, False), ids=("master", "no-master"))
@pytest.mark.parametrize("format", (DELAYED, "float8_blockwise", "nvfp4"))
@on_ranks(2)
def test_ranks_of_other_seeds(format, keep_master):
    """DDP takes rank 0's weights, and what formats remember."""
    kwargs = {"keep_master": keep_master, "stochastic_rounding": not keep_master}
    model = build(format, seed=dist.get_rank(), **kwargs)
    if "delayed" in format:
        train(model, steps=1 + dist.get_rank())
    model = DistributedDataParallel(model)
    train_ddp(model, 2)
    check_is_same_on_all_ranks(model)


def histories_of_replicas():
    """Histories, which are the same whichever wrapper makes the replicas."""
    found = []
    for wrap in ("ddp", "replicate", "hsdp"):
        model = build(DELAYED)
        if wrap == "ddp":
            model = DistributedDataParallel(model)
            losses = train_ddp(model, 2)
            histories = {name.removeprefix("module."): t for name, t in states(model).items()}
        else:
            if wrap == "replicate":
                replicate(model, mesh=full_mesh(names=("replicate",)))
            else:
                shard(model, full_mesh(dist.get_world_size(), 1, names=("replicate", "shard")))
            losses, histories = train(model, microbatches=2, synced=False), states(model)
        found.append((losses, histories))
        check_is_same_on_all_ranks(model)
    assert all(table[:, 1].all() for name, table in histories.items() if name.endswith("history"))
    for losses, histories in found[:-1]:
        assert losses == found[-1][0]
        assert not different(histories, found[-1][1])
    return {name: table.cpu() for name, table in histories.items()}


@on_ranks(2)
def test_replicas_agree_on_histories():
    histories_of_replicas()


@on_ranks(2)
def test_copies_of_a_module_step_without_other_ranks():
    """A copy of the module steps without other ranks, as an EMA on one rank. A copy of DDP steps as DDP."""
    ddp = DistributedDataParallel(build(DELAYED))
    train_ddp(ddp, 1)
    if dist.get_rank() == 0:
        alone = copy.deepcopy(ddp.module)
        with collectives() as calls:
            train(alone, steps=2)
        assert not calls
    copied = copy.deepcopy(ddp)
    losses = [train_ddp(each, 2) for each in (ddp, copied)]
    assert len(losses[0]) == 6
    check_is_same_on_all_ranks(copied)


@on_ranks(2)
def test_join_leaves_replicas_the_same():
    model = DistributedDataParallel(build(DELAYED))
    with pytest.raises(NotImplementedError, match=r"blocks.0.up.weight has delayed .*join\(\) lets"):
        Join([model])
    with pytest.raises(NotImplementedError, match="give all ranks as many inputs"), model.join():
        pass
    model = DistributedDataParallel(build("float8_blockwise"))
    optimizer = adamw(model)
    with model.join():
        for step in range(2 + dist.get_rank()):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert check_gathered(model) > 0
    check_is_same_on_all_ranks(model)


# --------------------------------------------------------------------------------- replicate()


def replicated(model):
    mesh = full_mesh(names=("replicate",))
    for block in model.blocks:
        replicate(block, mesh=mesh)
    return replicate(model, mesh=mesh)


@pytest.mark.parametrize("order", ("before", "after"))
@pytest.mark.parametrize("keep_master", (True, False), ids=("master", "no-master"))
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.each_value
@on_ranks(2, 3)
def test_replicate_trains_as_with_plain_weights(format, keep_master, order):
    if order == "before":
        model = replicated(build(format, keep_master=keep_master))
    else:
        model = quantize_model(replicated(build(format, lambda m, _: m)), format, keep_master=keep_master)
    losses = []
    optimizer = adamw(model)
    for step in range(3):
        check_gathered(model)
        losses += train(model, optimizer, steps=1, first_step=step, microbatches=2)
    assert check_gathered(model) > 0
    check_is_same_on_all_ranks(model)
    if device().type == "cpu" and keep_master:
        oracle = replicated(build(format, make_plain))
        assert train(oracle, microbatches=2) == losses
        assert not different(local_values(model), local_values(oracle))
    with collectives() as calls, torch.no_grad():
        model(batch(0))
    assert not calls  # every rank has everything


@on_ranks(2)
def test_a_hook_called_from_any_frame_knows_replicate():
    """A profiler, or another wrapper of FSDP2's, calls the hook from a function of its own."""
    mesh = full_mesh(names=("replicate",))
    model = replicate(build("float8_blockwise"), mesh=mesh)
    shards = [shard for shard in map(local, model.parameters()) if ops.is_quantized(shard)]
    for shard in shards:
        (image,), _ = shard.fsdp_pre_all_gather(mesh)
        assert image.numel() >= shard.numel()
    assert shards


class Rows(nn.Module):
    """Weights of one row, and of as many as ranks: what FSDP2's shards look like."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(48, 1, bias=False)
        self.each = nn.Linear(48, dist.get_world_size(), bias=False)

    def forward(self, x):
        return self.one(x) + self.each(x)


@pytest.mark.parametrize("format", ("float8_blockwise", DELAYED, "nvfp4"))
@on_ranks(2)
def test_replicate_of_few_rows_trains_as_with_plain_weights(format):
    torch.manual_seed(0)
    model = qshard.quantize_(Rows().to(device()), RECIPES[format])
    replicate(model, mesh=full_mesh(names=("replicate",)))
    optimizer = adamw(model)
    for step in range(3):
        x = torch.randn(4, 48, generator=torch.Generator().manual_seed(step)) * (1 + dist.get_rank())
        model(x.to(device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert check_gathered(model) == 2
    check_is_same_on_all_ranks(model)


@on_ranks(2, devices=("cpu",))
def test_quantize_after_a_forward_is_refused():
    model = replicated(build("float8_blockwise", lambda m, _: m))
    loss_of(model, batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"this model has run a forward under replicate\(\)"):
        qshard.quantize_(model, RECIPES["float8_blockwise"])
    assert not quantized_parameters(model)


# ----------------------------------------------------------------------------------------- ZeRO


def zero(model, **kwargs):
    trained = [p for p in model.parameters() if p.requires_grad]
    return ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=1e-2, **kwargs)


def images(model):
    return {n: image_bytes(local(p).detach()).clone() for n, p in quantized_parameters(model).items()}


def run_zero(format, keep_master):
    results = []
    for make_optimizer in (adamw, zero):
        kwargs = {"keep_master": keep_master, "stochastic_rounding": not keep_master}
        model = DistributedDataParallel(build(format, **kwargs))
        optimizer = make_optimizer(model)
        losses = train_ddp(model, 2, optimizer)
        check_is_same_on_all_ranks(model)
        results.append((losses, local_values(model), states(model), images(model)))
    assert results[0][0] == results[1][0]
    for plain, sharded in zip(results[0][1:], results[1][1:]):
        assert not different(plain, sharded)
    resume_zero(model, optimizer, format, kwargs)


def resume_zero(model, optimizer, format, kwargs):
    """With the optimizer's state, which rank 0 collects."""
    optimizer.consolidate_state_dict(to=0)
    saved = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    resumed = DistributedDataParallel(build(format, seed=1, **kwargs))
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer = zero(resumed)
    resumed_optimizer.load_state_dict(saved[0])
    for each, of in ((model, optimizer), (resumed, resumed_optimizer)):
        train(each, of, steps=2, first_step=3)
    assert not different(local_values(model), local_values(resumed))
    assert not different(states(model), states(resumed))
    assert not different(images(model), images(resumed))


@pytest.mark.parametrize("format", FORMATS)
@on_ranks(2)
def test_zero_redundancy_optimizer(format):
    run_zero(format, keep_master=True)


@pytest.mark.parametrize("format", ("float8_tensorwise", "float8_blockwise"))
@on_ranks(2)
def test_zero_redundancy_optimizer_without_masters(format):
    run_zero(format, keep_master=False)


@on_ranks(2, devices=("cpu",))
def test_zero_with_buckets_is_refused():
    model = DistributedDataParallel(build("float8_blockwise"))
    with pytest.raises(RuntimeError) as error:
        zero(model, parameters_as_bucket_view=True)
    error = str(error.value)
    assert "parameters_as_bucket_view" in error


@on_ranks(2)
def test_others_are_flushed_after_a_zero_step_that_raised():
    model = DistributedDataParallel(build("float8_blockwise"))
    failed = zero(model)

    def closure():
        raise ValueError("of the closure")

    with pytest.raises(ValueError, match="of the closure") as kept:
        failed.step(closure)
    other = qshard.quantize_(nn.Linear(32, 32).to(device()), qshard.Float8BlockScaling())
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other(torch.ones(4, 32, device=device())).sum().backward()
    with mock.patch.object(hooks, "flush_after_step") as flush:
        optimizer.step()
    assert kept.value.__traceback__ is not None and failed.param_groups  # they are still there
    assert flush.call_args.args[0] is optimizer, "the step was not flushed"
    # Those that are under way are told from it: each rank steps some parameters, and all flush.
    train_ddp(model, 1, failed)
    check_is_same_on_all_ranks(model)
