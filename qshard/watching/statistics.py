"""What a watch says of a weight and its operands, and how it follows from what the library counts."""

import math
from dataclasses import dataclass

import torch
from tabulate import tabulate

OPERANDS = ("weight", "input", "gradient")
# The order of Statistic in kernels/statistics/tally.h.
COUNTED = ("squares", "error_squares", "count", "underflows", "saturated", "nonfinite", "amax", "scale_max", "scale_min")


@dataclass(frozen=True)
class TensorStatistics:
    """What quantizing lost of one operand in one step, over the micro-batches and ranks that quantized it. Shares are
    between 0 and 1. Infinite and NaN elements count in `nonfinite` alone, and in `amax`."""

    amax: float  # largest magnitude of the values; NaN if one is NaN
    scale_min: float  # smallest of what codes are multiplied by
    scale_max: float  # and largest, NaN if one is NaN
    underflow: float  # share of elements that are not zero and whose code is
    saturated: float  # share beyond the largest code, by more than rounding explains
    nonfinite: float  # share of elements that are infinite or NaN, or whose code is
    relative_error: float  # ||x - q|| / ||x||, x the values and q what their codes stand for
    snr_db: float  # signal-to-noise ratio, 10 log10(||x||^2 / ||x - q||^2); infinite without an error
    mse: float  # mean of (x - q)^2
    bytes: int  # codes and scales of one use on this rank, in the orientation that was counted


@dataclass(frozen=True)
class WeightStatistics:
    """A weight and the operands that its linear multiplied in one step: None for what was not quantized there, or
    could not be counted (docs/watching.md)."""

    name: str
    format: str
    step: int
    weight: TensorStatistics | None
    input: TensorStatistics | None
    gradient: TensorStatistics | None


def of_operand(counted: list[float], size: int) -> TensorStatistics | None:
    """`counted`: the numbers of COUNTED."""
    x = dict(zip(COUNTED, counted, strict=True))
    count, error, squares = x["count"], x["error_squares"], x["squares"]
    if count == 0:
        return None
    ratio = error / squares if squares > 0 else (math.inf if error > 0 else 0.0)
    return TensorStatistics(
        amax=x["amax"],
        scale_min=x["scale_min"],
        scale_max=x["scale_max"],
        underflow=x["underflows"] / count,
        saturated=x["saturated"] / count,
        nonfinite=x["nonfinite"] / count,
        relative_error=math.sqrt(ratio),
        snr_db=-10 * math.log10(ratio) if ratio > 0 else math.inf,
        mse=error / count,
        bytes=size,
    )


def of_weight(name: str, format: str, step: int, counted: torch.Tensor, sizes: list[int]) -> WeightStatistics:
    """`counted`: float64 (3, 9) on the CPU; `sizes`: bytes of the three operands."""
    operands = [of_operand(row, size) for row, size in zip(counted.tolist(), sizes, strict=True)]
    return WeightStatistics(name, format, step, **dict(zip(OPERANDS, operands)))


def table(statistics: dict[str, WeightStatistics]) -> str:
    """What quantizing lost, as a table with a row for each operand."""
    rows = [
        [name, of_name.step, operand, f"{x.snr_db:.1f}", f"{100 * x.underflow:.3g}", f"{100 * x.saturated:.3g}",
         f"{100 * x.nonfinite:.3g}", f"{x.amax:.3g}", f"{x.scale_min:.3g}", f"{x.scale_max:.3g}"]
        for name, of_name in statistics.items()
        for operand in OPERANDS
        if (x := getattr(of_name, operand)) is not None
    ]
    headers = ["parameter", "step", "operand", "SNR dB", "underflow %", "saturated %", "nonfinite %", "amax",
               "scale min", "scale max"]
    return "\n".join(["what quantizing lost:", tabulate(rows, headers=headers), ""])
