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


# As many pieces of tokens go into one reduce-scatter each, sent as one. More are copied into one piece.
_MOST_PIECES = 16


def scattered_sum(x, dim, group, ranks):
    """This rank's part, along `dim`, of the sum of x (...), which has the same shape on all ranks."""
    pieces = x.shape[:dim].numel()
    if 1 < pieces <= _MOST_PIECES:
        return _scattered_pieces(x, dim, group, ranks)
    shape = _part_shape(x, dim, ranks)
    x = torch.cat(x.chunk(ranks, dim)) if pieces > 1 else x.contiguous().flatten(0, dim)
    if torch.compiler.is_compiling():
        return funcol.reduce_scatter_tensor(x, "sum", 0, group).view(shape)
    part = x.new_empty(shape)
    group = distributed_c10d._resolve_process_group(group)
    dist.reduce_scatter_tensor(part.view(-1, *x.shape[1:]), x, group=group)
    return part


def _scattered_pieces(x, dim, group, ranks):
    """Cut by the dimensions before `dim`, pieces are as a reduce-scatter takes and gives them."""
    pieces = x.contiguous().flatten(0, dim - 1).unbind(0)
    if torch.compiler.is_compiling():
        parts = funcol.reduce_scatter_tensor_coalesced(list(pieces), "sum", [0] * len(pieces), group)
        return torch.stack(parts).view(_part_shape(x, dim, ranks))
    part = x.new_empty(_part_shape(x, dim, ranks))
    group = distributed_c10d._resolve_process_group(group)
    with dist._coalescing_manager(group=group):
        for piece, own in zip(pieces, part.flatten(0, dim - 1).unbind(0), strict=True):
            dist.reduce_scatter_tensor(own, piece, group=group)
    return part


def _part_shape(x, dim, ranks):
    return [size // ranks if i == dim else size for i, size in enumerate(x.shape)]


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
