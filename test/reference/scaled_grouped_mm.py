"""What `aten::_scaled_grouped_mm_v2` computes of the bytes of MXFP8 and NVFP4, and what it asks for.

After aten/src/ATen/native/cuda/GroupedBlas.cpp of torch 2.11 and MSLK's grouped_common.cuh.
"""

import torch

from . import float4
from .layout import ceil_div, round_up

BLOCKWISE_1X16, BLOCKWISE_1X32, TENSORWISE = 2, 3, 0  # at::blas::ScalingType
NO_SWIZZLE, SWIZZLE_32_4_4 = 0, 1  # at::blas::SwizzleType


def unswizzled(stored: torch.Tensor, rows: int, n: int) -> torch.Tensor:
    """(rows, n) of the bytes of a matrix of scales, as the documentation of cuBLAS orders them."""
    i, j = torch.arange(rows)[:, None], torch.arange(n)
    tile = i // 128 * ceil_div(n, 4) + j // 4
    return stored[tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4]


def scale_bytes(rows: int, n: int) -> int:
    return round_up(rows, 128) * round_up(n, 4)


def decoded(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype == torch.float8_e4m3fn:
        return codes.double()
    return float4.decode(float4.unpack(codes.view(torch.uint8), 2 * codes.shape[1])).double()


class Operand:
    """Rows that are contracted: codes, and the scales that are still to be read."""

    def __init__(self, codes, scales):
        self.block = 32 if codes.dtype == torch.float8_e4m3fn else 16
        assert codes.is_contiguous() and codes.shape[-1] % 16 == 0
        assert scales.is_contiguous() and scales.dim() == 2
        assert scales.dtype == (torch.float8_e8m0fnu if self.block == 32 else torch.float8_e4m3fn)
        self.codes, self.scale_dtype = codes, scales.dtype
        self.left = scales.view(torch.uint8).flatten()

    def matrix(self, codes):
        """The values of a matrix whose scales come next."""
        rows, contracted = codes.shape
        # The kernel counts blocks so: what is left over is in none.
        assert contracted % self.block == 0
        n = contracted // self.block
        size = scale_bytes(rows, n)
        assert size <= self.left.numel()
        scales = unswizzled(self.left, rows, n).view(self.scale_dtype).double()
        self.left = self.left[size:]
        return codes * scales.repeat_interleave(self.block, 1)


def scaled_grouped_mm(
    a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, offs=None, bias=None, out_dtype=None,
    contraction_dim=(), use_fast_accum=False,
):  # fmt: skip
    """The operator's arguments. What it does not write is NaN."""
    b = b.transpose(-2, -1)
    is_nvfp4 = a.dtype == torch.float4_e2m1fn_x2
    recipe = [BLOCKWISE_1X16, TENSORWISE] if is_nvfp4 else [BLOCKWISE_1X32]
    assert list(recipe_a) == list(recipe_b) == recipe and a.dtype == b.dtype
    assert swizzle_a[0] == swizzle_b[0] == SWIZZLE_32_4_4
    assert bias is None and out_dtype == torch.bfloat16 and a.dim() == 2
    assert offs.dtype == torch.int32 and offs.is_contiguous() and 0 < len(offs) <= 1024
    assert b.shape[-2] % 16 == 0 and a.shape[-1] == b.shape[-1]
    left, right = Operand(a, scale_a[0]), Operand(b, scale_b[0])
    factors = torch.ones(len(offs))
    if is_nvfp4:
        assert scale_a[1].shape == scale_b[1].shape == offs.shape
        factors = scale_a[1] * scale_b[1]
    cut_rows = b.dim() == 3
    assert scale_a[0].shape[0] >= len(a)
    if cut_rows:
        assert len(b) == len(offs)
        assert scale_b[0].shape == (len(b), scale_bytes(b.shape[1], decoded(b[0]).shape[1] // right.block))
    else:
        assert scale_b[0].shape[0] >= len(b)
    a, b = decoded(a), [decoded(one) for one in b] if cut_rows else decoded(b)
    shape = (len(a), len(b[0])) if cut_rows else (len(offs), len(a), len(b))
    out, begin = torch.full(shape, float("nan")), 0
    for group, (end, factor) in enumerate(zip(offs.tolist(), factors)):
        assert begin <= end <= (len(a) if cut_rows else a.shape[1])
        if cut_rows:
            weight = right.matrix(b[group])
            out[begin:end] = (left.matrix(a[begin:end]) @ weight.t()).float() * factor
        elif begin < end:
            # Copies of the matrices begin at a multiple of 16 bytes.
            assert begin % 32 == 0 and end % 32 == 0
            of = slice(begin, end)
            out[group] = (left.matrix(a[:, of]) @ right.matrix(b[:, of]).t()).float() * factor
        begin = end
    return out.bfloat16()
