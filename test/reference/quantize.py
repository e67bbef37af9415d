"""Row images and grids of weights.

A table here has one entry per block of the *logical* tensor (layout.block_shape), whatever part of
it the shard holds; `table[rows][:, cols]` with layout.block_indices() is the entry of each element.
"""

import dataclasses

import torch

from . import float4, row_scales, stochastic
from .formats import amax_of, decode, encode, scale_from_amax
from .layout import Layout


def amax_table(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Largest |x| of this shard's live rows in every block, NaN if there is one; 0 without rows."""
    x = values[: layout.live_rows].float().abs()
    bits = torch.where(x.isnan(), float("nan"), x).view(torch.int32)  # NaN is above infinity
    rows, cols = layout.block_indices()
    block = rows[:, None] * layout.block_shape[1] + cols
    table = torch.zeros(layout.block_shape, dtype=torch.int32)
    table.view(-1).scatter_reduce_(0, block.view(-1), bits.reshape(-1), "amax")
    return table.view(torch.float32)


def compute_amax(values: torch.Tensor, layout: Layout, ranks: int = 1) -> torch.Tensor:
    """This shard's part of what `ranks` ranks agree on: amaxes of the grid, then of cut blocks."""
    if layout.format.columnwise:  # nothing cuts blocks of one row
        return compute_amax(values, layout.columnwise, ranks)
    table = amax_table(values, layout)
    if not layout.format.row_scale:
        return table.flatten()
    grid = torch.zeros(layout.grid_shape)
    for matrix in range(layout.grid_shape[0]):
        first = matrix * layout.block_rows_per_matrix
        grid[matrix] = amax_of(table[first : first + layout.block_rows_per_matrix])
    return torch.cat([grid.flatten(), table[layout.cut_block_rows(ranks)].flatten()])


def combine_amax(parts: list[torch.Tensor]) -> torch.Tensor:
    """What the all-reduce does: the maximum of the float bits, so that NaN wins."""
    bits = torch.stack([p.view(torch.int32) for p in parts]).amax(0)
    return bits.to(torch.int32).view(torch.float32)


def of_block_rows(grid: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A grid of one entry per matrix, repeated for every block row."""
    return grid.repeat_interleave(layout.block_rows_per_matrix, dim=0)


def quantize(
    values: torch.Tensor,
    layout: Layout,
    amax: torch.Tensor | None = None,
    ranks: int = 1,
    rounding: tuple[int, int] | None = None,
):
    """(image uint8 (rows, row_bytes), grid fp32 scale_inv) of a shard; `amax`: the agreed one.

    `rounding`: (64-bit key, count) of stochastic rounding; None: to nearest even.
    """
    format = layout.format
    if amax is None:
        amax = compute_amax(values, layout, ranks)
    if format.columnwise:
        rowwise, grid = quantize(values, layout.rowwise, amax[:0], ranks, rounding)
        columnwise, _ = quantize(values, layout.columnwise, amax, ranks, rounding)
        return torch.cat([rowwise, columnwise], 1), grid
    grid_numel = layout.grid_shape[0] * layout.grid_shape[1]
    grid_amax = amax.flatten()[:grid_numel].view(layout.grid_shape)
    if format.row_scale:
        table = amax_table(values, layout)
        cut = layout.cut_block_rows(ranks)
        table[cut] = amax[grid_numel:].view(len(cut), layout.block_shape[1])

    if not format.row_scale:
        code_max = torch.finfo(format.code_dtype).max
        scale = scale_from_amax(grid_amax, code_max, format.power_of_two_scales)
        grid = 1 / scale
    elif not format.tensor_scale:
        scale_bytes, scale = row_scales.mxfp8_scales(table)
        grid = grid_amax
    else:
        grid = row_scales.nvfp4_tensor_scale_inv(grid_amax, format.four_over_six)
        scale_bytes, scale = row_scales.nvfp4_scales(table, of_block_rows(grid, layout))
        if format.four_over_six:  # a block lies in one row, and a row on one rank
            here = layout.block_indices()[0][: layout.live_rows]
            of_rows = values[: layout.live_rows], table[here], of_block_rows(grid, layout)[here]
            scale_bytes[here], scale[here] = row_scales.four_over_six(*of_rows)

    rows, cols = layout.block_indices()
    live = values[: layout.live_rows]
    scale = scale[rows][:, cols]
    if rounding is not None:
        codes = stochastic.encode(live, scale, format, stochastic.words_of(layout, *rounding))
    elif format.code_bits == 4:
        codes = float4.encode(live, scale)
    else:
        codes = encode(live, scale, format.code_dtype)
    if format.code_bits == 4:
        codes = float4.pack(codes)

    image = torch.zeros(layout.rows, layout.row_bytes, dtype=torch.uint8)
    image[: layout.live_rows, : layout.code_bytes] = codes
    if format.row_scale:
        first = layout.row_scale_offset
        image[: layout.live_rows, first : first + layout.row_scale_bytes] = (
            slices_of(scale_bytes, layout) if format.sliced else scale_bytes[rows]
        )
    return image, grid


def slices_of(scale_bytes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The part of their blocks' scale bytes that each live row holds; zeros where there are no more."""
    rows_per_block, width = layout.block[0], layout.row_scale_bytes
    missing = rows_per_block * width - scale_bytes.shape[1]
    padded = torch.nn.functional.pad(scale_bytes, (0, missing))
    first = layout.row_offset
    return padded.view(len(padded) * rows_per_block, width)[first : first + layout.live_rows]


def unsliced(slices: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The reverse, of whole blocks: all scale bytes of its block for each row."""
    rows_per_block = layout.block[0]
    blocks, bytes_per_block = len(slices) // rows_per_block, rows_per_block * layout.row_scale_bytes
    whole = slices.reshape(blocks, bytes_per_block)[:, : layout.cols]
    return whole.repeat_interleave(rows_per_block, dim=0)


def dequantize_columnwise(image: torch.Tensor, layout: Layout, dtype: torch.dtype):
    """Values of the columnwise image of a whole tensor."""
    return dequantize(
        image[:, layout.image_row_bytes :], torch.zeros(0, 0), layout.columnwise, dtype
    )


def dequantize(image: torch.Tensor, grid: torch.Tensor, layout: Layout, dtype: torch.dtype):
    """Values of a shard; rows outside the logical tensor are zero, an open one sits at row 0."""
    if layout.row_offset is None:
        layout = dataclasses.replace(layout, row_offset=0)
    format = layout.format
    rows, cols = layout.block_indices()
    live = image[: layout.live_rows]
    scale_bytes = live[:, layout.row_scale_offset :][:, : layout.row_scale_bytes]
    if format.sliced:
        scale_bytes = unsliced(scale_bytes, layout)
    if not format.row_scale:
        scale_inv = grid[rows]
    elif not format.tensor_scale:
        scale_inv = row_scales.e8m0_to_float(scale_bytes)
    else:
        tensor_scale_inv = of_block_rows(grid, layout)[rows]
        scale_inv = row_scales.nvfp4_block_scale_inv(scale_bytes, tensor_scale_inv)

    codes = live[:, : layout.code_bytes]
    if format.code_bits == 4:
        decoded = float4.decode(float4.unpack(codes, layout.cols))
    else:
        decoded = decode(codes)
    read = (decoded * scale_inv[:, cols]).to(dtype)
    if format.row_scale:
        read[scale_inv[:, cols].isnan()] = float("nan")  # without a sign
    values = torch.zeros(layout.rows, layout.cols, dtype=dtype)
    values[: layout.live_rows] = read
    return values
