"""How modules multiply rows that lie expert by expert, each by its own matrix, without asking the device for a
number: rows [offs[e - 1], offs[e]) belong to expert e, and rows from offs[-1] on to none."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard.nn.parts.autocast import activation_dtype

_grouped_linear = torch.ops.qshard.grouped_linear.default
swiglu_experts = torch.ops.qshard.swiglu_experts.default


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    *,
    is_quantized: bool,
    weight_only: bool = False,
    weight_format: str | None = None,
) -> Tensor:
    """x: (T, in); weight: (experts, out, in); bias: (experts, out); offs: int32 (experts,). (T, out) in the dtype of
    activations, whose rows of no expert are zeros, and so is their gradient of x, whatever they hold.

    is_quantized: of the weight, or that it is to be quantized at each use, by `weight_format`."""
    if is_quantized:
        y = _grouped_linear(x, weight, offs, weight_only=weight_only, format=weight_format)
    else:
        y = _plain(x.to(activation_dtype(x)), weight, offs)
    return y if bias is None else _AddBias.apply(y, bias, offs)


def local_part(tensor: Tensor | None) -> Tensor | None:
    """What this rank has of a DTensor, with a gradient of its own placement; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ends_of(sorted_ids: Tensor, experts: int) -> Tensor:
    """offs of rows by the numbers of their experts, which ascend; those from `experts` on are no expert's."""
    numbers = torch.arange(experts, dtype=sorted_ids.dtype, device=sorted_ids.device)
    return torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)


def ends_of_counts(counts: Tensor) -> Tensor:
    """offs of the numbers of rows that the experts have, one after the other."""
    return counts.cumsum(0, dtype=torch.int32)


def inverse_of(order: Tensor) -> Tensor:
    """Where each row is after x[order] has put rows into another order: x[order][inverse_of(order)] is x."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def experts_of(rows: int, offs: Tensor) -> Tensor:
    """The expert of each row; of rows of none the number of experts."""
    numbers = torch.arange(rows, dtype=offs.dtype, device=offs.device)
    return torch.searchsorted(_ascending(rows, offs), numbers, right=True)


def _ascending(rows, offs):
    """What the operator makes of ends that are behind the last row, or before the one before."""
    return offs.clamp(0, rows).cummax(0).values


def _plain(x, weight, offs):
    """torch's grouped_mm leaves rows of no expert as its memory was, in the output and in the gradient, and takes
    no gradient that is expanded."""
    offs = _ascending(len(x), offs)
    is_some = (torch.arange(len(x), device=offs.device) < offs[-1])[:, None]
    x = torch.where(is_some, x, 0)
    y = F.grouped_mm(x, weight.to(x.dtype).transpose(-2, -1), offs=offs)
    return torch.where(is_some, y, 0)


class _AddBias(torch.autograd.Function):
    """Adds to each row the bias of its expert. The gradient of a bias is the sum of its rows in fp32, one after the
    other, as it would be neither for rows that are added up where they are indexed (in the dtype of the bias) nor
    for a product with ones and zeros (which a NaN of one expert would make NaN of all)."""

    @staticmethod
    def forward(ctx, y, bias, offs):
        ctx.save_for_backward(offs)
        ctx.dtype = bias.dtype
        experts = experts_of(len(y), offs)
        has_bias = (experts < len(bias))[:, None]
        return torch.where(has_bias, y + bias.to(y.dtype)[experts.clamp(max=len(bias) - 1)], y)

    @staticmethod
    def backward(ctx, grad):
        grad_y, grad_bias, _ = ctx.needs_input_grad
        (offs,) = ctx.saved_tensors
        if not grad_bias:
            return grad if grad_y else None, None, None
        edges = F.pad(_ascending(len(grad), offs).long(), (1, 0))
        rows = grad.float().contiguous()
        sums = torch.segment_reduce(rows, "sum", offsets=edges, axis=0, initial=0, unsafe=True)
        return grad if grad_y else None, sums.to(ctx.dtype), None


class PickRows(torch.autograd.Function):
    """x[index] of an index that names each row `times` times. Where they are, `places` says: (len(x) * times,), the
    places of the first row, then of the second. So the gradient is picked, too, and added up in one order."""

    @staticmethod
    def forward(ctx, x, index, places, times):
        ctx.save_for_backward(places)
        ctx.times = times
        return x[index]

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        grad = grad[places]
        return grad if ctx.times == 1 else grad.unflatten(0, (-1, ctx.times)).sum(1), None, None, None
