"""The formats' numbers and the scale formula.

amax -> scale = code_max / amax (fp32); 0, inf and NaN -> 1; overflow -> FLT_MAX; with power-of-two
scales the mantissa is cleared (rounded down); scale_inv = 1 / scale, subnormals kept.
"""

from dataclasses import dataclass

import torch

FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Format:
    name: str
    block: tuple[int, int] | None  # rows x cols sharing a scale; None: a whole matrix
    power_of_two_scales: bool
    code_dtype: torch.dtype = torch.float8_e4m3fn
    grad_dtype: torch.dtype = torch.float8_e4m3fn


FORMATS = {
    f.name: f
    for f in (
        Format("float8_tensorwise", None, True, grad_dtype=torch.float8_e5m2),
        Format("float8_tensorwise_fp32_scale", None, False, grad_dtype=torch.float8_e5m2),
        Format("float8_blockwise", (128, 128), True),
        Format("float8_blockwise_fp32_scale", (128, 128), False),
    )
}


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest |x| as an fp32 scalar; NaN wins over everything; 0 for no elements."""
    x = x.float().abs()
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32)
    if x.isnan().any():
        return torch.tensor(float("nan"))
    return x.max()


def scale_from_amax(amax: torch.Tensor, code_max: float, power_of_two: bool) -> torch.Tensor:
    amax = amax.to(torch.float32)
    scale = torch.full_like(amax, code_max) / amax
    scale = torch.where(scale.isinf(), torch.full_like(scale, FLT_MAX), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def encode(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 codes of x * scale, nearest even, saturating; NaN keeps its sign."""
    code_max = torch.finfo(dtype).max
    x = x.float()
    codes = (x * scale).clamp(-code_max, code_max).to(dtype).view(torch.uint8)
    sign = (x.view(torch.int32) < 0).to(torch.uint8) << 7
    return torch.where(x.isnan(), 0x7F | sign, codes)


def decode(codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (codes.view(torch.float8_e4m3fn).float() * scale_inv).to(dtype)
