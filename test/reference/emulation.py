"""What a linear's GEMMs of codes multiply: operands in fp64, with all scales.

Each is (rows, contracted). `words`: the three integers of stochastic rounding; None rounds to nearest.
`four_over_six`: of NVFP4's activations and gradients; a weight's is its format's.
"""

from dataclasses import replace

import torch

from . import activations, quantize, stochastic
from .formats import FORMATS, Format, encode, scale_from_amax
from .hadamard import transposed
from .layout import Layout

# As activations meet MXFP8 and NVFP4 weights: in blocks of one row.
IN_ROWS = {
    torch.float8_e8m0fnu: Format("mxfp8_rows", (1, 32), True, row_scale=torch.float8_e8m0fnu),
    torch.float8_e4m3fn: FORMATS["nvfp4_1x16"],
}


def decoded(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.contiguous().view(dtype).double()


def row_scaled(x: torch.Tensor, format: Format, words=None, four_over_six: bool = False) -> torch.Tensor:
    """Quantized and read back. fp32 holds it: E2M1 x E4M3 x a tensor scale of 16 bits has 22."""
    layout = Layout.whole(replace(IN_ROWS[format.row_scale], four_over_six=four_over_six), *x.shape)
    rounding = None
    if words is not None:
        low, high, count = words.tolist()
        rounding = stochastic.key_of(low, high), count
    image, grid = quantize.quantize(x, layout, rounding=rounding)
    return quantize.dequantize(image, grid, layout, torch.float32).double()


def by_amax(x: torch.Tensor, format: Format, dtype: torch.dtype, amax) -> torch.Tensor:
    """With one scale, of another amax than that of x: delayed scaling."""
    scale = scale_from_amax(torch.as_tensor(amax), torch.finfo(dtype).max, format.power_of_two_scales)
    return decoded(encode(x, scale, dtype), dtype) * (1 / scale).double()


def grid_scaled(x: torch.Tensor, format: Format, dtype: torch.dtype, square: bool = False):
    pow2 = format.power_of_two_scales
    if format.block is None:
        codes, scale_inv = activations.quantize_tensorwise(x, dtype, pow2)
    elif format.scales_rows:
        codes, scale_inv = activations.quantize_rowwise(x, dtype, pow2)
        scale_inv = scale_inv[:, None]
    elif square:
        codes, scale_inv = activations.quantize_128x128(x, dtype, pow2)
        scale_inv = activations.expand_128x128(scale_inv, *x.shape)
    else:
        codes, scale_inv = activations.quantize_1x128(x, dtype, pow2)
        scale_inv = activations.expand_1x128(scale_inv, x.shape[1])
    return decoded(codes, dtype) * scale_inv.double()


def rows_of(
    x: torch.Tensor, format: Format, is_gradient: bool = False, words=None, four_over_six: bool = False
) -> torch.Tensor:
    """x (M, K), which a GEMM contracts along K."""
    if format.row_scale:
        return row_scaled(x, format, words, four_over_six)
    return grid_scaled(x, format, format.grad_dtype if is_gradient else format.code_dtype)


def columns_of(
    x: torch.Tensor,
    format: Format,
    is_gradient: bool = False,
    words=None,
    square: bool = True,
    hadamard: bool = True,
    four_over_six: bool = False,
) -> torch.Tensor:
    """x (M, K) as (K, M or more), which a GEMM contracts along M. square: an input meets blocks of 128x128.
    hadamard: NVFP4's go through the transform."""
    if format.row_scale:
        return row_scaled(transposed(x, hadamard and format.tensor_scale), format, words, four_over_six)
    dtype = format.grad_dtype if is_gradient else format.code_dtype
    return grid_scaled(x.t().contiguous(), format, dtype, square and not is_gradient)


def folded(grad: torch.Tensor, weight: torch.Tensor, format: Format) -> torch.Tensor:
    """A gradient (M, N) as dgrad quantizes it: times the scales of the rows of the weight (N, K)."""
    if not format.scales_rows:
        return grad
    _, grid = quantize.quantize(weight, Layout.whole(format, *weight.shape))
    return grad.float() * grid.view(-1)


def weight_of(weight: torch.Tensor, format: Format, columnwise: bool = False) -> torch.Tensor:
    """A weight (N, K): forward reads it as it is, dgrad transposed and, of rows with one scale, without."""
    layout = Layout.whole(format, *weight.shape)
    image, grid = quantize.quantize(weight, layout)
    if columnwise and format.scales_rows:
        return decoded(image[:, : layout.cols], format.code_dtype)
    if columnwise and format.columnwise:
        return quantize.dequantize_columnwise(image, layout, torch.float32).double()
    if format.row_scale or format.power_of_two_scales:
        return quantize.dequantize(image, grid, layout, torch.float32).double()
    rows, cols = layout.block_indices()
    return decoded(image[:, : layout.cols], format.code_dtype) * grid[rows][:, cols].double()
