"""Gradients in few bits that are no numbers: GradScaler, clip_grad_norm_ and detect_anomaly see them as they see
plain gradients'."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, full_mesh, gather_objects, on_ranks
from models.blocks import Model
from models.fsdp2 import shard
from models.training import batch, gradients, loss_of
from models.weights import local
from reference import gradient_message
from torch.nn.parallel import DistributedDataParallel

import qshard

BUDGET_S = 45
FORMATS = tuple(gradient_message.FORMATS)
roundings = pytest.mark.parametrize("rounding", ("nearest", "stochastic"))
wrappers = pytest.mark.parametrize("wrapper", ("fsdp", "hsdp", "ddp"))


def wrapped(wrapper, fmt, rounding="nearest"):
    """fmt None: gradients are reduced as they are."""
    torch.manual_seed(0)
    model = Model(257).to(device())
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
        if fmt is not None:
            model.register_comm_hook(None, qshard.ddp_comm_hook(fmt, rounding=rounding))
        return model
    shape = (2, 2) if wrapper == "hsdp" else (dist.get_world_size(),)
    mesh = full_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    model = shard(model, mesh=mesh)
    if fmt is not None:
        qshard.reduce_gradients_(model, fmt, rounding=rounding)
    return model


def inputs(step, value=None, ranks=(-1,)):
    """`value` in the input of some ranks."""
    x = batch(step).detach()
    if value is not None and dist.get_rank() in [rank % dist.get_world_size() for rank in ranks]:
        x[0, 0] = value
    return x


def values_of(model):
    return [local(parameter).detach().clone() for parameter in model.parameters()]


def steps(model, value):
    """(the scale, whether any parameter changed) after each step; the second has `value`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device().type, init_scale=1024.0, growth_interval=1)
    trace = []
    for step in range(3):
        before = values_of(model)
        loss = loss_of(model, inputs(step, value if step == 1 else None))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = values_of(model)
        changed = any(not torch.equal(a, b) for a, b in zip(before, after))
        trace.append((scaler.get_scale(), any(gather_objects(changed))))
    assert all(value.isfinite().all() for value in values_of(model))
    return trace


@pytest.mark.pairwise
@pytest.mark.parametrize("value", (float("inf"), float("nan")))
@wrappers
@roundings
@pytest.mark.parametrize("fmt", FORMATS)
@on_ranks(4)
def test_grad_scaler_skips_the_step_on_every_rank(fmt, rounding, wrapper, value):
    expected = [(2048.0, True), (1024.0, False), (2048.0, True)]
    assert steps(wrapped(wrapper, None), value) == expected
    assert steps(wrapped(wrapper, fmt, rounding), value) == expected


@roundings
@pytest.mark.parametrize("fmt", FORMATS)
@on_ranks(2)
def test_clipping_sees_nan_and_infinity(fmt, rounding):
    model = wrapped("fsdp", fmt, rounding)
    for value, is_finite in ((None, True), (float("inf"), False), (float("nan"), False)):
        loss_of(model, inputs(0, value)).backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert bool(total.full_tensor().isfinite()) == is_finite
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("wrapper", ("fsdp", "ddp"))
@on_ranks(2)
def test_detect_anomaly_names_nan_gradients_alone(wrapper):
    results = []
    for detect in (False, True):
        model = wrapped(wrapper, "float8")
        with torch.autograd.set_detect_anomaly(detect):
            loss_of(model, inputs(0)).backward()
        results.append(gradients(model).values())
    assert all(torch.equal(a, b) for a, b in zip(*results))
    everywhere = range(dist.get_world_size())  # one that fails alone leaves the others waiting
    with torch.autograd.set_detect_anomaly(True):
        loss = loss_of(model, inputs(0, float("inf"), everywhere))
        with pytest.raises(RuntimeError, match="returned nan values"):
            loss.backward()
