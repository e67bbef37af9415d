"""The formats, and the numbers of FP8 codes under fp32 scales.

amax -> scale = code_max / amax (fp32); 0, inf and NaN -> 1; overflow -> FLT_MAX; with power-of-two
scales the mantissa is cleared (rounded down); scale_inv = 1 / scale, subnormals kept.

Formats with a `row_scale` keep the scales of blocks in the row image instead: see row_scales.py.
"""

from dataclasses import dataclass, replace

import torch

FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Format:
    name: str
    block: tuple[int, int | None] | None  # rows x cols sharing a scale; None: all columns, or a whole matrix
    power_of_two_scales: bool
    code_dtype: torch.dtype = torch.float8_e4m3fn
    grad_dtype: torch.dtype = torch.float8_e4m3fn
    row_scale: torch.dtype | None = None  # of a block's scale in its rows; None: it is in the grid
    tensor_scale: bool = False  # whether one fp32 scale of the matrix is above those of its blocks
    sliced: bool = False  # the rows of a block each hold a slice of its scales, not all of them
    four_over_six: bool = False  # a block's largest value becomes code 6 or 4, by its squared error
    columnwise: "Format | None" = None  # of a second image that follows in each row, for dgrad

    @property
    def code_bits(self) -> int:
        return 4 if self.code_dtype == torch.float4_e2m1fn_x2 else 8

    @property
    def scales_rows(self) -> bool:
        """Whether each row of a weight has one scale: dgrad multiplies the gradient by them."""
        return self.block == (1, None)


FORMATS = {
    f.name: f
    for f in (
        Format("float8_tensorwise", None, True, grad_dtype=torch.float8_e5m2),
        Format("float8_tensorwise_fp32_scale", None, False, grad_dtype=torch.float8_e5m2),
        # For a tensor that no optimizer step has changed; then see delayed_scaling.py.
        Format("float8_delayed", None, False, grad_dtype=torch.float8_e5m2),
        Format("float8_rowwise", (1, None), True),
        Format("float8_rowwise_fp32_scale", (1, None), False),
        Format("float8_blockwise", (128, 128), True),
        Format("float8_blockwise_fp32_scale", (128, 128), False),
        Format("mxfp8", (32, 32), True, row_scale=torch.float8_e8m0fnu),
        Format(
            "mxfp8_1x32",
            (1, 32),
            True,
            row_scale=torch.float8_e8m0fnu,
            columnwise=Format(
                "mxfp8_32x1", (32, 1), True, row_scale=torch.float8_e8m0fnu, sliced=True
            ),
        ),
        *(
            Format(
                name,
                block,
                False,
                code_dtype=torch.float4_e2m1fn_x2,
                grad_dtype=torch.float4_e2m1fn_x2,
                row_scale=torch.float8_e4m3fn,
                tensor_scale=True,
            )
            for name, block in (("nvfp4", (16, 16)), ("nvfp4_1x16", (1, 16)))
        ),
    )
}

# Formats with options that change codes.
VARIANTS = {
    f.name: f for f in (replace(FORMATS["nvfp4_1x16"], name="nvfp4_1x16[4over6]", four_over_six=True),)
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
    """uint8 FP8 codes of x * scale, nearest even, saturating; NaN keeps its sign."""
    code_max = torch.finfo(dtype).max
    x = x.float()
    codes = (x * scale).clamp(-code_max, code_max).to(dtype).view(torch.uint8)
    sign = x.signbit().to(torch.uint8) << 7
    return torch.where(x.isnan(), 0x7F | sign, codes)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E4M3 codes."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()
