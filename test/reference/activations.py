"""Activations and gradients on their way into a GEMM: in blocks, or with one scale per row or tensor."""

import itertools

import torch

from .formats import amax_of, encode, scale_from_amax


def quantize_1x128(x: torch.Tensor, dtype=torch.float8_e4m3fn, power_of_two: bool = True):
    """codes (M, K) uint8 and scale_inv (M, ceil(K / 128)) of blocks of 128 along the last dim."""
    m, k = x.shape
    blocks = -(-k // 128)
    codes = torch.zeros(m, k, dtype=torch.uint8)
    scale_inv = torch.ones(m, blocks)
    for j in range(blocks):
        part = x[:, 128 * j : 128 * (j + 1)]
        amax = torch.stack([amax_of(row) for row in part]) if m else torch.zeros(0)
        scale = scale_from_amax(amax, torch.finfo(dtype).max, power_of_two)
        codes[:, 128 * j : 128 * (j + 1)] = encode(part, scale[:, None], dtype)
        scale_inv[:, j] = 1 / scale
    return codes, scale_inv


def quantize_rowwise(x: torch.Tensor, dtype=torch.float8_e4m3fn, power_of_two: bool = True):
    """codes (M, K) uint8 and scale_inv (M,)."""
    amax = torch.stack([amax_of(row) for row in x]) if len(x) else torch.zeros(0)
    scale = scale_from_amax(amax, torch.finfo(dtype).max, power_of_two)
    return encode(x, scale[:, None], dtype), 1 / scale


def quantize_128x128(x: torch.Tensor, dtype=torch.float8_e4m3fn, power_of_two: bool = True):
    """codes (M, K) uint8 and scale_inv (ceil(M / 128), ceil(K / 128)): inputs of wgrad, transposed."""
    m, k = x.shape
    codes = torch.zeros(m, k, dtype=torch.uint8)
    scale_inv = torch.ones(-(-m // 128), -(-k // 128))
    for i, j in itertools.product(*map(range, scale_inv.shape)):
        block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
        codes[block], scale_inv[i, j] = quantize_tensorwise(x[block], dtype, power_of_two)
    return codes, scale_inv


def quantize_tensorwise(x: torch.Tensor, dtype=torch.float8_e4m3fn, power_of_two: bool = True):
    """codes of x's shape and the scalar scale_inv; gradients use float8_e5m2."""
    scale = scale_from_amax(amax_of(x), torch.finfo(dtype).max, power_of_two)
    return encode(x, scale, dtype), 1 / scale


def expand_1x128(scale_inv: torch.Tensor, k: int) -> torch.Tensor:
    return scale_inv.repeat_interleave(128, dim=1)[:, :k]


def expand_128x128(scale_inv: torch.Tensor, m: int, k: int) -> torch.Tensor:
    return expand_1x128(scale_inv.repeat_interleave(128, dim=0)[:m], k)


def columns_of_1x128(codes: torch.Tensor, scale_inv: torch.Tensor):
    """quantize_1x128's result as wgrad reads it where nothing but codes arrived: codes (M, K) uint8 and scale_inv
    (ceil(M / 128), ceil(K / 128)), the largest of the rows' that have any code but 0, and 1 without one. Where an
    input meets blocks of 128x128, and a gradient 1x128 along M, of which all in 128x128 then have one scale."""
    m, k = codes.shape
    made = codes.clone()
    largest = torch.ones(-(-m // 128), -(-k // 128))
    for i, j in itertools.product(*map(range, largest.shape)):
        block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
        made[block], largest[i, j] = by_largest_scale(codes[block], scale_inv[block[0], j])
    return made, largest


def columns_of_rows(codes: torch.Tensor, scale_inv: torch.Tensor):
    """So quantize_rowwise's result, as wgrad reads it: codes (M, K) uint8 and a scalar scale_inv, which all columns
    have."""
    return by_largest_scale(codes, scale_inv)


def by_largest_scale(codes: torch.Tensor, scale_inv: torch.Tensor):
    """codes (M, K) of rows with scale_inv (M,) by the largest of the rows that have any code but 0, a scalar, and 1
    without one."""
    counts = ((codes & 0x7F) != 0).any(1)
    largest = scale_inv[counts].max() if counts.any() else torch.ones(())
    # Codes of zeros stay what they are by any scale.
    factor = torch.where(counts, scale_inv.double() / largest.double(), 1.0)[:, None]
    values = codes.contiguous().view(torch.float8_e4m3fn).double() * factor
    rounded = encode(values.float(), torch.ones(()), torch.float8_e4m3fn)
    return torch.where((codes & 0x7F) == 0x7F, codes, rounded), largest
