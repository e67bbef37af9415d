"""What quantizing loses of a matrix, as a watch counts it (kernels/statistics/tally.h).

Each matrix is taken apart into what its codes are and the scale of each element: x is read back as their product,
rounded to fp32.
"""

import dataclasses
import math

import torch

from . import activations, float4, quantize, row_scales
from .emulation import IN_ROWS
from .formats import Format, decode, encode, scale_from_amax
from .layout import Layout
from .stochastic import key_of

# Half a step beyond the largest code: what rounding takes to it.
LIMITS = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0, torch.float4_e2m1fn_x2: 7.0}


def parts_of_image(image: torch.Tensor, grid: torch.Tensor, layout: Layout):
    """Codes as numbers, and scales, both fp32 (live rows, cols)."""
    rows, cols = layout.block_indices()
    live = image[: layout.live_rows]
    scale_bytes = live[:, layout.row_scale_offset :][:, : layout.row_scale_bytes]
    if not layout.format.row_scale:
        scale_inv = grid[rows]
    elif not layout.format.tensor_scale:
        scale_inv = row_scales.e8m0_to_float(scale_bytes)
    else:
        of_rows = quantize.of_block_rows(grid, layout)[rows]
        scale_inv = row_scales.nvfp4_block_scale_inv(scale_bytes, of_rows)
    codes = live[:, : layout.code_bytes]
    if layout.format.code_bits == 4:
        return float4.decode(float4.unpack(codes, layout.cols)), scale_inv[:, cols]
    return decode(codes), scale_inv[:, cols]


def parts_of_weight(weight: torch.Tensor, format: Format):
    """The same of a weight's rowwise image."""
    layout = Layout.whole(dataclasses.replace(format, columnwise=None), *weight.shape)
    return parts_of_image(*quantize.quantize(weight, layout), layout)


def parts_of_rows(x: torch.Tensor, format: Format, is_gradient=False, words=None, amax=None):
    """The same of an input or a gradient (M, K), which forward or dgrad reads. `words`: as emulation.py has them;
    `amax`: of delayed scaling, if it is not that of x."""
    if format.row_scale:
        layout = Layout.whole(IN_ROWS[format.row_scale], *x.shape)
        rounding = None if words is None else (key_of(*words.tolist()[:2]), words.tolist()[2])
        return parts_of_image(*quantize.quantize(x, layout, rounding=rounding), layout)
    dtype, pow2 = format.grad_dtype if is_gradient else format.code_dtype, format.power_of_two_scales
    if amax is not None:
        scale = scale_from_amax(torch.as_tensor(amax), torch.finfo(dtype).max, pow2)
        codes, scale_inv = encode(x, scale, dtype), (1 / scale).view(1, 1)
    elif format.block is None:
        codes, scale_inv = activations.quantize_tensorwise(x, dtype, pow2)
        scale_inv = scale_inv.view(1, 1)
    elif format.scales_rows:
        codes, scale_inv = activations.quantize_rowwise(x, dtype, pow2)
        scale_inv = scale_inv[:, None]
    else:
        codes, scale_inv = activations.quantize_1x128(x, dtype, pow2)
        scale_inv = activations.expand_1x128(scale_inv, x.shape[1])
    return codes.contiguous().view(dtype).float(), scale_inv.expand(*x.shape)


def statistics_of(operands, code_dtype: torch.dtype) -> dict[str, float]:
    """The statistics of one operand of a step, of [(x, codes, scales)] of its micro-batches and ranks. The keys are
    the names of qshard.watching.TensorStatistics."""
    x, codes, scales = (torch.cat([part.flatten().float() for part in parts]) for parts in zip(*operands))
    read = codes * scales
    finite = x.isfinite() & read.isfinite()
    v, q, scale = (t[finite].double() for t in (x, read, scales))
    squares, errors = v.square().sum().item(), (v - q).square().sum().item()
    ratio = errors / squares if squares else (math.inf if errors else 0.0)
    amax = float("nan") if x.isnan().any() else x.abs().max().item()
    count = x.numel()
    return {
        "amax": amax,
        "scale_min": scales.nan_to_num(math.inf, math.inf).min().item(),
        "scale_max": scales.max().item(),
        "underflow": ((v != 0) & (q == 0)).sum().item() / count,
        "saturated": (v.abs() > LIMITS[code_dtype] * scale).sum().item() / count,
        "nonfinite": (~finite).sum().item() / count,
        "relative_error": math.sqrt(ratio),
        "snr_db": -10 * math.log10(ratio) if ratio else math.inf,
        "mse": errors / count,
    }
