"""New tensors of sharded weights: what is written into a DTensor of new_empty is its value on every
rank, and no rank waits for another, whatever rows they hold."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, full_mesh, gather_objects, on_ranks, on_worlds
from helpers import FORMATS, assert_same, is_quantized, ops, weight
from models.weights import check_gathered, full_value, local
from test_shard_windows import Holder, chosen, step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from qshard.formats import info_of

BUDGET_S = 90
formats = pytest.mark.parametrize("fmt", FORMATS)
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
SHAPES = ((1, 64), (3, 64), (64, 64), (1, 32, 64), (3, 32, 64), (133, 48), (257, 100))
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def make(fmt, keep_master, shape, trained):
    model = fully_shard(Holder(fmt, keep_master, shape), mesh=full_mesh())
    if trained:
        step(model)
    return model


def in_step():
    """All ranks are where this one is: no collective of theirs awaits another."""
    count = torch.ones((), device=device())
    dist.all_reduce(count)
    assert count == dist.get_world_size()


# ----------------------------------------------------- DTensors that plain values are written to

NEW = {
    "new_empty": lambda d: d.new_empty(d.shape),
    "new_zeros": lambda d: d.new_zeros(d.shape),
    "new_ones": lambda d: d.new_ones(d.shape),
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "local new_empty": lambda d: of_local(d, local(d).new_empty(local(d).shape)),
    "local new_zeros": lambda d: of_local(d, local(d).new_zeros(local(d).shape)),
}


def of_local(d, new):
    return DTensor.from_local(
        new, d.device_mesh, d.placements, run_check=False, shape=d.shape, stride=d.stride()
    )


def plain_values(d):
    return weight(*d.shape, seed=8).to(device(), d.dtype)


def distributed(d):
    return distribute_tensor(plain_values(d), d.device_mesh, d.placements)


def local_part(d):
    """The values that lie on this rank as FSDP2 cuts rows."""
    return local(distributed(d)).clone()


WRITES = {
    "copy_": lambda d: d.copy_(distributed(d)),
    "local copy_": lambda d: local(d).copy_(local_part(d)),
    "fill_": lambda d: d.fill_(2.5),
    "zero_, add_": lambda d: d.zero_().add_(distributed(d)),
    "mul_, copy_": lambda d: d.mul_(0).copy_(distributed(d)),
    "columns": lambda d: (d.zero_(), d[..., 1::2].add_(3.0)),
    "data": lambda d: local(d).data.copy_(local_part(d)),
    "lerp_": lambda d: d.fill_(1.0).lerp_(distributed(d), 0.5),
}
USES = {
    "flush": lambda d, grad: ops.flush([local(d)]) if is_quantized(local(d)) else None,
    "step": lambda d, grad: stepped(d, grad),
    "full_tensor": lambda d, grad: None,
    "mul_": lambda d, grad: d.mul_(2.0),
    "product": lambda d, grad: multiplied(d),
    "sum": lambda d, grad: d.sum().full_tensor(),
}


def stepped(d, grad):
    param = nn.Parameter(d)
    param.grad = grad
    torch.optim.SGD([param], lr=0.5).step()


def multiplied(d):
    x = torch.ones(4, d.shape[-1], device=device(), dtype=d.dtype)
    x = distribute_tensor(x, d.device_mesh, [Replicate()])
    (x @ d.mT).full_tensor()


@torch.no_grad()
def run_written(keep_master, shape, new, write, use):
    fmt = chosen(FORMATS, keep_master, shape, new, write, use)
    model = make(fmt, keep_master, shape, trained=chosen((False, True), shape, new, write))
    d = NEW[new](model.weight.detach())
    plain = distribute_tensor(full_value(model.weight), full_mesh(), model.weight.placements)
    twin = NEW[new](plain)
    facts = gather_objects(is_quantized(local(d)))
    assert len(set(facts)) == 1, f"quantized by rank: {facts}"
    for tensor in (d, twin):
        WRITES[write](tensor)
    assert_same(local(d), local(twin), "written")
    grad = distribute_tensor(torch.full(d.shape, 0.25, device=device()), full_mesh(), d.placements)
    for tensor in (d, twin):
        USES[use](tensor, grad)
    in_step()
    if keep_master or use == "full_tensor":
        assert_same(d.full_tensor() * 1, twin.full_tensor(), "used")
    else:
        error = (d.full_tensor() * 1 - twin.full_tensor()).norm() / twin.full_tensor().norm()
        assert error < (0.3 if info_of(fmt).code_bits == 4 else 0.05), f"off by {error:.1%}"
    step(model)
    assert check_gathered(model) == 1


@pytest.mark.pairwise
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("new", NEW)
@shapes
@keep_or_not
@on_worlds(2, 4)
def test_a_new_dtensor_that_is_written(world, keep_master, shape, new, write):
    use = chosen(USES, keep_master, shape, new, write, world)
    world.run(run_written, keep_master, shape, new, write, use)


@shapes
@keep_or_not
@formats
@on_ranks(2)
@torch.no_grad()
def test_a_step_over_a_weight_and_a_new_dtensor(fmt, keep_master, shape):
    """One of two optimizers' parameters is new: its flush is of every rank, or of none."""
    model = make(fmt, keep_master, shape, trained=True)
    for write in ("copy_", "local copy_", "fill_"):
        new = model.weight.detach().new_empty(model.weight.shape)
        WRITES[write](new)
        params = [model.weight, nn.Parameter(new)]
        for param in params:
            param.grad = torch.zeros_like(param)
            local(param.grad).fill_(1.0)
        before = [full_value(param) for param in params]
        torch.optim.AdamW(params, lr=1e-2, fused=True).step()
        in_step()
        for param, was in zip(params, before):
            assert not torch.equal(full_value(param), was)
        model.weight.grad = None
        assert check_gathered(model) == 1
