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

ops = torch.ops.qshard


def all_reduced(x, group):
    if torch.compiler.is_compiling():
        return funcol.all_reduce(x, "sum", group)
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=distributed_c10d._resolve_process_group(group))
    return x


def scattered_sum(x, dim, group):
    """This rank's part, along `dim`, of the sum of x (...), which has the same shape on all ranks."""
    return ops._sum_and_scatter_tokens(x, dim, group)


def gathered(x, dim, format, is_gradient, group):
    """x (..., K) of all ranks, put together along `dim`. format: of the weight that it meets, as codes of which it
    travels, or "" to gather values."""
    return ops._gather_tokens(x, dim, format, is_gradient, group)


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
    def forward(ctx, x, dim, format, group):
        ctx.args = dim, group
        return gathered(x, dim, format, False, group)

    @staticmethod
    def backward(ctx, grad):
        return scattered_sum(grad, *ctx.args), None, None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, format, group):
        ctx.args = dim, format, True, group
        return scattered_sum(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, *ctx.args), None, None, None


copy_to_ranks = _CopyToRanks.apply
gather_input = _GatherInput.apply
sum_over_ranks = _SumOverRanks.apply
scatter_sum = _ScatterSum.apply
