"""Row images and grids of weights."""

import dataclasses

import torch

from .formats import amax_of, decode, encode, scale_from_amax
from .layout import Layout


def compute_amax(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This shard's part of every logical block's amax (grid_shape); 0 where it holds no rows."""
    amax = torch.zeros(layout.grid_shape, dtype=torch.float32)
    for i, j, rows, cols in layout.blocks():
        amax[i, j] = amax_of(values[rows, cols])
    return amax


def combine_amax(parts: list[torch.Tensor]) -> torch.Tensor:
    """What the all-reduce does: the maximum of the float bits, so that NaN wins."""
    bits = torch.stack([p.view(torch.int32) for p in parts]).amax(0)
    return bits.to(torch.int32).view(torch.float32)


def scales(amax: torch.Tensor, layout: Layout) -> torch.Tensor:
    code_max = torch.finfo(layout.format.code_dtype).max
    return scale_from_amax(amax, code_max, layout.format.power_of_two_scales)


def quantize(values: torch.Tensor, layout: Layout, amax: torch.Tensor | None = None):
    """(image uint8 (rows, row_bytes), grid fp32 scale_inv) of a shard."""
    if amax is None:
        amax = compute_amax(values, layout)
    scale = scales(amax, layout)
    image = torch.zeros(layout.rows, layout.row_bytes, dtype=torch.uint8)
    for i, j, rows, cols in layout.blocks():
        part = encode(values[rows, cols], scale[i, j], layout.format.code_dtype)
        image[rows, cols.start : cols.start + part.shape[1]] = part
    return image, 1 / scale


def dequantize(image: torch.Tensor, grid: torch.Tensor, layout: Layout, dtype: torch.dtype):
    """Values of a shard; rows outside the logical tensor are zero, an open one sits at row 0."""
    if layout.row_offset is None:
        layout = dataclasses.replace(layout, row_offset=0)
    values = torch.zeros(layout.rows, layout.cols, dtype=dtype)
    for i, j, rows, cols in layout.blocks():
        codes = image[rows, : layout.cols][:, cols].contiguous()
        values[rows, cols] = decode(codes, grid[i, j], dtype)
    return values
