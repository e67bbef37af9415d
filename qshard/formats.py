"""What the library says of a format (kernels/format/formats.h)."""

import functools
import json
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScaleLevel:
    """Scales of blocks of one size. A code stands for itself times the scale of each level."""

    dtype: torch.dtype
    block_rows: int | None  # rows of a matrix that share a scale; None: all of them
    block_cols: int | None  # columns that share it; None: all of them
    place: str  # "grid": beside the rows; "rows": each row has those of its blocks; "slices": a part of them
    power_of_two: bool  # every scale is a power of two

    @property
    def spans_matrix(self) -> bool:
        return self.block_rows is None and self.block_cols is None


@dataclass(frozen=True)
class ActivationCodes:
    """How activations and gradients are quantized to meet a weight."""

    input_dtype: torch.dtype
    gradient_dtype: torch.dtype
    power_of_two_scales: bool
    hadamard_columns: bool  # codes that wgrad reads are of the random Hadamard transform
    stochastic_gradients: bool  # gradients are rounded stochastically
    row_format: str | None  # theirs as rows that hold their scales, as GEMMs read them or ranks send them
    packed_input_dtype: torch.dtype
    packed_gradient_dtype: torch.dtype
    packed_rows: str  # scale modes of packed codes, as GemmPairing.scale_mode
    packed_input_columns: str
    packed_gradient_columns: str


@dataclass(frozen=True)
class GemmPairing:
    """Which GEMMs multiply the codes, and where."""

    kind: str  # "packed": FP8, of packed activations; "row_images": block-scaled
    scale_mode: str  # "tensor", "row", "128x128", "1x32" or "1x16"
    transposes_weight: bool  # dgrad reads the weight's codes transposed
    folds_row_scales: bool  # dgrad multiplies the gradient by the scales of the weight's rows
    first_capability: int  # compute capability, 90 for 9.0
    last_capability: int | None


@dataclass(frozen=True)
class AmaxHistory:
    length: int
    margin: int
    most_recent: bool


@dataclass(frozen=True)
class FormatInfo:
    name: str
    base: str  # without options
    code_dtype: torch.dtype
    code_bits: int
    code_max: float
    scale: ScaleLevel  # of blocks of codes
    outer_scale: ScaleLevel | None  # above it
    activations: ActivationCodes
    gemm: GemmPairing
    amax_history: AmaxHistory | None  # of delayed scaling
    stochastic_rounding: bool
    columnwise: ScaleLevel | None  # of a second image, which dgrad reads
    gathers_by_phase: bool
    emulated: bool
    four_over_six: bool  # blocks end in code 6 or 4, whichever has the smaller squared error

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a scale spans a whole matrix."""
        return any(level is not None and level.spans_matrix for level in (self.scale, self.outer_scale))


def _made(cls, fields: dict | None):
    if fields is None:
        return None
    return cls(**{name: _value(name, value) for name, value in fields.items()})


def _value(name, value):
    if name.endswith("dtype"):
        return getattr(torch, value)
    return _made(_PARTS[name], value) if name in _PARTS else value


_PARTS = {
    "scale": ScaleLevel,
    "outer_scale": ScaleLevel,
    "columnwise": ScaleLevel,
    "activations": ActivationCodes,
    "gemm": GemmPairing,
    "amax_history": AmaxHistory,
}


@functools.lru_cache(maxsize=256)
def info_of(format: str) -> FormatInfo:
    """Raises ValueError for a name that no format has."""
    return _made(FormatInfo, json.loads(torch.ops.qshard.format_info(format)))
