"""Normalizations whose input and weight are DTensors, as SequenceParallel makes them, on local tensors."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard.tensor_parallel.local import distributed, local_part


def norm_of_tokens(step: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """step(x, weight), which normalizes over the last dimension. DTensors on a mesh of one dimension,
    x whole or cut along tokens and the weight whole, are normalized by their local tensors: the result is placed as x is, and
    the weight's gradient is summed over ranks that hold other tokens."""
    if not _runs_locally(x, weight):
        return step(x, weight)
    (placement,) = x.placements
    local = step(x.to_local(), local_part(weight, is_summed=placement.is_shard()))
    if not torch.compiler.is_compiling():
        return _PlacedAs.apply(local, x._spec)
    shape, stride = x.shape, torch.empty(x.shape, device="meta").stride()
    return DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride
    )


class _PlacedAs(torch.autograd.Function):
    """A local tensor as a DTensor of a spec that is there, in a fraction of from_local's time."""

    @staticmethod
    def forward(ctx, local, spec):
        ctx.placements = spec.placements
        return distributed(local.detach(), spec)

    @staticmethod
    def backward(ctx, grad):
        if grad.placements != ctx.placements:
            grad = grad.redistribute(placements=ctx.placements)
        return grad.to_local(), None


def _runs_locally(x, weight):
    if not (isinstance(x, DTensor) and isinstance(weight, DTensor)):
        return False
    mesh = x.device_mesh
    if mesh.ndim != 1 or weight.device_mesh != mesh or not weight.placements[0].is_replicate():
        return False
    (placement,) = x.placements
    return placement.is_replicate() or (placement.is_shard() and placement.dim not in (-1, x.ndim - 1))
