"""Linears whose weight is a DTensor, as parallelize_module leaves it.

DTensor takes aten.linear apart before it looks at it, and would redistribute a weight as plain values. Here
the input alone is redistributed, the one operator runs on local tensors, and its output is wrapped:

    weight       input        output      gradient of the input
    Shard(0)     Replicate    Shard(-1)   Partial                 (ColwiseParallel)
    Shard(1)     Shard(-1)    Partial     Shard(-1)               (RowwiseParallel)
    Replicate    as it is     as it is    as it is
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from qshard.tensor_parallel.local import OnOneRank, check_can_be_read, local_part
from qshard.tensor_parallel.shared import shared

_linear = torch.ops.qshard.linear.default


def linear(module, input, how):
    """The forward of a linear with a quantized DTensor as its weight: (..., in_features), a DTensor on
    the weight's mesh, to (..., out_features), another. `how`: as of qshard.nn.linear.multiply."""
    weight, bias = module.weight, module.bias
    mesh, placement = _placement_of(weight, how.is_tensor_parallel)
    if not isinstance(input, DTensor) or input.device_mesh != mesh:
        raise TypeError(
            f"qshard.nn.Linear: the weight is a DTensor on {mesh}, and the input is not; "
            "parallelize_module with ColwiseParallel or RowwiseParallel makes it one"
        )
    last = input.ndim - 1
    weight_grad = placement
    if placement.is_shard(0):
        wanted, result, input_grad = Replicate(), Shard(last), Partial()
    elif placement.is_shard(1):
        wanted, result, input_grad = Shard(last), Partial(), Shard(last)
    else:
        (given,) = input.placements
        is_kept = given.is_replicate() or (given.is_shard() and given.dim != last)
        wanted = result = input_grad = given if is_kept else Replicate()
        weight_grad = Partial() if wanted.is_shard() else placement
    if input.placements != (wanted,):
        check_can_be_read((weight,))
        input = input.redistribute(placements=(wanted,))
    if bias is not None:
        # The bias of a sharded output's rows, or of all.
        grad = Partial() if weight_grad.is_partial() else None
        bias = bias.to_local(grad_placements=grad and (grad,)) if isinstance(bias, DTensor) else bias
        if result.is_partial():
            bias = OnOneRank.apply(bias, mesh.get_local_rank() == 0)
    is_as_placed = weight_grad == placement
    output = _linear(
        shared(input, (input_grad,), lambda: input.to_local(grad_placements=(input_grad,))),
        local_part(weight) if is_as_placed else weight.to_local(grad_placements=(weight_grad,)),
        bias,
        weight_only=how.weight_only,
        format=how.weight_format,
    )
    # Sizes that the ranks do not divide are not to be guessed from the local ones.
    shape = torch.Size((*input.shape[:-1], weight.shape[0]))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(output, mesh, (result,), run_check=False, shape=shape, stride=strides)


def _placement_of(weight, is_tensor_parallel):
    if not is_tensor_parallel:
        raise NotImplementedError(
            f"qshard.nn.Linear: the weight is a DTensor placed as {weight.placements}. After "
            "parallelize_module say qshard.quantize_(model, recipe, tp_mesh=tp_mesh); under "
            "fully_shard call the module that it was applied to, which gathers the weight"
        )
    if weight.device_mesh.ndim != 1:
        raise NotImplementedError(
            f"qshard.nn.Linear: the weight is placed as {weight.placements} on a mesh of "
            f"{weight.device_mesh.ndim} dimensions; tensor parallelism over one is supported, and "
            "under fully_shard a weight is there in forward of the module that it was applied to"
        )
    return weight.device_mesh, weight.placements[0]
