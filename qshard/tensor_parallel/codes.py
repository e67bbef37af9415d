"""All-gathers of activations and gradients that move codes and scales, not values.

What arrives is, bit for bit, what quantizing the gathered values gives: blocks lie within one token, and
the amax of a scale that spans all tokens is agreed on by the ranks first.

    weight's format       message of an activation            of a gradient
    float8_tensorwise*    E4M3, one scale of all tokens       E5M2, the same
    float8_delayed        E4M3, one fp32 scale of all tokens  its gradients' codes, the same
    float8_blockwise*     E4M3 in blocks of 1x128             the same
    mxfp8*                E4M3 in blocks of 1x32              the same
    nvfp4*                E2M1 in blocks of 1x16              values
"""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

ops = torch.ops.qshard

_E5M2_MAX = 57344.0
_FLOAT_MAX = torch.finfo(torch.float32).max
_EXPONENT = 0xFF << 23


def message_format(format: str) -> tuple[str, bool]:
    """Of a weight's format: that of the message, and whether each token is a matrix of its own, in which
    square blocks are one row high."""
    base = format.split("[")[0]
    if base == "float8_delayed":
        # A scale that is no power of two keeps the amax, which the weight's history collects.
        return "float8_tensorwise_fp32_scale", False
    if base.startswith("nvfp4"):
        return "nvfp4_1x16", False
    if base.startswith("mxfp8"):
        return "mxfp8", True
    return base, base.startswith("float8_blockwise")


def gather_rows(rows: torch.Tensor, group: str) -> torch.Tensor:
    """(M, ...) of each rank to (ranks x M, ...)."""
    group = distributed_c10d._resolve_process_group(group)
    rows = rows.contiguous()
    gathered = rows.new_empty((group.size() * rows.shape[0], *rows.shape[1:]))
    dist.all_gather_into_tensor(gathered, rows, group=group)
    return gathered


def gather_activation(x: torch.Tensor, format: str, group: str) -> torch.Tensor:
    """x (M, K) of each rank, with one M: the values (ranks x M, K), in the dtype of x, of the codes of an
    activation that meets a weight of `format`. One all-gather of bytes; before it an all-reduce of
    amaxes for a scale of all tokens, and of one amax per block for float8_blockwise."""
    handle = distributed_c10d._resolve_process_group(group)
    ranks, (m, k) = handle.size(), x.shape
    if x.numel() == 0:
        return x.new_empty(ranks * m, k)
    format, is_row_by_row = message_format(format)
    x = x.contiguous()
    part = ops.quantize(
        x.unsqueeze(1) if is_row_by_row else x,
        format,
        logical_rows=ranks * m,
        row_offset=handle.rank() * m,
    )
    message = ops._pre_all_gather(part, group)
    gathered = ops._post_all_gather(part, gather_rows(message.flatten(), group), x.dtype)
    return ops.dequantize(gathered, dtype=x.dtype).view(ranks * m, k)


def gather_gradient(grad: torch.Tensor, format: str, group: str) -> torch.Tensor:
    """As gather_activation, of a gradient. NVFP4's are rounded after a random transform of all tokens:
    values are gathered."""
    base = format.split("[")[0]
    if base.startswith("nvfp4"):
        return gather_rows(grad, group)
    is_e5m2 = base.startswith(("float8_tensorwise", "float8_delayed")) and "e4m3" not in format
    if not is_e5m2 or grad.numel() == 0:
        return gather_activation(grad, format, group)
    is_power_of_two = base == "float8_tensorwise"
    amax = grad.abs().max().float()
    # As an integer, so that a NaN is the largest.
    bits = amax.view(torch.int32).clone()
    handle = distributed_c10d._resolve_process_group(group)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=handle)
    scale = e5m2_scale(bits.view(torch.float32), is_power_of_two)
    codes = (grad.float() * scale).clamp(-_E5M2_MAX, _E5M2_MAX).to(torch.float8_e5m2)
    gathered = gather_rows(codes.view(torch.uint8), group).view(torch.float8_e5m2)
    return (gathered.float() * (1 / scale)).to(grad.dtype)


def e5m2_scale(amax: torch.Tensor, is_power_of_two: bool) -> torch.Tensor:
    """Per-tensor scaling of gradients: 57344 / amax, float32 of one element; 1 of an amax that is zero or
    not finite."""
    scale = (_E5M2_MAX / amax).clamp(max=_FLOAT_MAX)
    if is_power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


@torch.library.custom_op("qshard::_gather_tokens", mutates_args=())
def gather_tokens(x: torch.Tensor, dim: int, format: str, is_gradient: bool, group: str) -> torch.Tensor:
    """x (..., K), cut in equal parts along `dim`: the whole, in the dtype of x. format: of the weight that
    it meets, or "" to gather values. An operator, which compilers do not look into."""
    return gather_tokens_now(x, dim, format, is_gradient, group)


@gather_tokens.register_fake
def _(x, dim, format, is_gradient, group):
    ranks = distributed_c10d._resolve_process_group(group).size()
    return x.new_empty([size * ranks if i == dim else size for i, size in enumerate(x.shape)])


@torch.no_grad()
def gather_tokens_now(x, dim, format, is_gradient, group):
    rows = x.reshape(-1, x.shape[-1])
    if format:
        rows = (gather_gradient if is_gradient else gather_activation)(rows, format, group)
    else:
        rows = gather_rows(rows, group)
    ranks = distributed_c10d._resolve_process_group(group).size()
    if dim == 0:
        return rows.view(ranks * x.shape[0], *x.shape[1:])
    parts = rows.view(ranks, *x.shape).movedim(0, dim)
    return parts.reshape([size * ranks if i == dim else size for i, size in enumerate(x.shape)])
