"""What goes into a parallel linear and comes out of it, on plain local tensors, with gradients.

    input of a column       copy_to_ranks       x as it is         all-reduce of its gradient
    ... sequence parallel   gather_input        all-gather         reduce-scatter
    output of a row         sum_over_ranks      all-reduce         the gradient as it is
    ... sequence parallel   scatter_sum         reduce-scatter     all-gather
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d

from qshard.tensor_parallel import codes


def all_reduced(x, group):
    if torch.compiler.is_compiling():
        return funcol.all_reduce(x, "sum", group)
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=distributed_c10d._resolve_process_group(group))
    return x


def scattered_sum(x, dim, group, ranks):
    """Of x (...), the same shape on all ranks, this rank's part of the sum along `dim`."""
    if dim:
        x = torch.cat(x.chunk(ranks, dim))
    if torch.compiler.is_compiling():
        return funcol.reduce_scatter_tensor(x, "sum", 0, group)
    part = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    dist.reduce_scatter_tensor(
        part, x.contiguous(), group=distributed_c10d._resolve_process_group(group)
    )
    return part


def gathered(x, dim, format, is_gradient, group):
    is_opaque = torch.compiler.is_compiling()
    gather = codes.gather_tokens if is_opaque else codes.gather_tokens_now
    return gather(x, dim, format, is_gradient, group)


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduced(grad, ctx.group), None


class _GatherInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, format, group, ranks):
        ctx.args = dim, group, ranks
        return gathered(x, dim, format, False, group)

    @staticmethod
    def backward(ctx, grad):
        return scattered_sum(grad, *ctx.args), None, None, None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, format, group, ranks):
        ctx.args = dim, format, True, group
        return scattered_sum(x, dim, group, ranks)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, *ctx.args), None, None, None, None


copy_to_ranks = _CopyToRanks.apply
gather_input = _GatherInput.apply
sum_over_ranks = _SumOverRanks.apply
scatter_sum = _ScatterSum.apply
