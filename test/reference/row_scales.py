"""Scales of blocks that lie in the row image, one byte per block and row.

mxfp8 (OCP MX v1.0, scales rounded up): byte e means 2^(e - 127), 255 is NaN. The smallest e with
amax <= 448 * 2^(e - 127), 254 for infinity; codes are E4M3 of x * 2^(127 - e).

nvfp4: the matrix has scale_inv = amax / 2688, rounded to fp32 and then to 16 significant bits; 1
for 0, inf, NaN and where that is 0. With S = 1 / scale_inv a block's byte is E4M3 of
amax * (S / 6), at most 448; codes are E2M1 of x * (S / E4M3 value), of 0 where that scale is 0.

With four_over_six it is amax / 1536 in place of amax / 2688, and a block may end in code 4: its byte is then E4M3
of amax * (S / 4). It does where the sum of squares of code * E4M3 value - x * S is smaller so, added up in fp32
in pairs of neighbours, the sums in pairs again.

Scale NaN: codes are those of x, and the whole block reads as NaN. Scales above FLT_MAX are FLT_MAX.
Quotients and products are rounded to fp32 one by one. (Taking them in float64 first changes
nothing: it has more than twice the bits.)
"""

import torch

from . import float4
from .formats import FLT_MAX


def divide(a, b) -> torch.Tensor:
    return (torch.as_tensor(a).double() / torch.as_tensor(b).double()).float().clamp(max=FLT_MAX)


def multiply(a, b) -> torch.Tensor:
    return (torch.as_tensor(a).double() * torch.as_tensor(b).double()).float()


# ------------------------------------------------------------------------------------- mxfp8


E8M0 = torch.tensor([2.0 ** (e - 127) for e in range(255)] + [float("nan")], dtype=torch.float64)


def e8m0_from_amax(amax: torch.Tensor) -> torch.Tensor:
    e = torch.searchsorted(448 * E8M0[:255], amax.double()).clamp(max=254)
    return torch.where(amax.isnan(), 255, e).to(torch.uint8)


def e8m0_to_float(e: torch.Tensor) -> torch.Tensor:
    return E8M0[e.int()].float()


def mxfp8_scales(amax: torch.Tensor):
    """(byte, what a block's values are multiplied by)."""
    e = e8m0_from_amax(amax)
    return e, torch.where(e == 255, 1.0, 1 / e8m0_to_float(e).double()).float()


# ------------------------------------------------------------------------------------- nvfp4


def round_to_16_bits(x: torch.Tensor) -> torch.Tensor:
    """fp32 x with 16 significant bits, fewer where fp32 is subnormal; to nearest even."""
    exponents = torch.frexp(x).exponent.flatten().tolist()  # |x| < 2^exponent
    ulps = [2.0 ** (max(exponent, -125) - 16) for exponent in exponents]
    ulp = torch.tensor(ulps, dtype=torch.float64).view(x.shape)
    return ((x.double() / ulp).round() * ulp).float()


def nvfp4_tensor_scale_inv(amax: torch.Tensor, four_over_six: bool = False) -> torch.Tensor:
    scale_inv = round_to_16_bits(divide(amax, 6 * (256 if four_over_six else 448)))
    usual = (amax > 0) & amax.isfinite() & (scale_inv > 0)
    return torch.where(usual, scale_inv, 1.0)


def nvfp4_scales(amax: torch.Tensor, tensor_scale_inv: torch.Tensor, largest_code: int = 6):
    """(byte, what a block's values are multiplied by)."""
    tensor_scale = divide(1, tensor_scale_inv)
    scale = multiply(amax, divide(tensor_scale, largest_code)).clamp(max=448).to(torch.float8_e4m3fn)
    encode_scale = divide(tensor_scale, scale)
    encode_scale = torch.where(scale.float() == 0, 0.0, encode_scale)
    return scale.view(torch.uint8), torch.where(scale.isnan(), 1.0, encode_scale)


def four_over_six(values: torch.Tensor, amax: torch.Tensor, tensor_scale_inv: torch.Tensor):
    """nvfp4_scales of the blocks of 16 values of each row, by the errors of both largest codes."""
    x = torch.nn.functional.pad(values.float(), (0, -values.shape[1] % 16)).reshape(*amax.shape, 16)
    scaled = multiply(x, divide(1, tensor_scale_inv)[..., None])
    candidates, errors = [], []
    for largest_code in (6, 4):
        scales = nvfp4_scales(amax, tensor_scale_inv, largest_code)
        codes = float4.decode(float4.encode(x, scales[1][..., None]))
        read = multiply(codes, scales[0].view(torch.float8_e4m3fn).float()[..., None])
        error = (read - scaled) ** 2
        while error.shape[-1] > 1:
            error = error[..., 0::2] + error[..., 1::2]
        candidates.append(scales)
        errors.append(error[..., 0])
    is_four = errors[1] < errors[0]
    return tuple(torch.where(is_four, four, six) for six, four in zip(*candidates))


def nvfp4_block_scale_inv(scale: torch.Tensor, tensor_scale_inv: torch.Tensor) -> torch.Tensor:
    return multiply(scale.contiguous().view(torch.float8_e4m3fn), tensor_scale_inv)
