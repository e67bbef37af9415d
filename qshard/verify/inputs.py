"""Inputs that are the same on every machine: made by integer arithmetic, on the CPU."""

import functools

import torch

from qshard.formats import info_of

SIGN = 1 << 31
MADE = 1 << 18  # elements; more of them are the same again


def tiled(made: torch.Tensor, count: int) -> torch.Tensor:
    return made[:count] if count <= MADE else made.repeat(-(-count // MADE))[:count]


@functools.lru_cache(maxsize=64)
def words(count: int, seed: int) -> torch.Tensor:
    """`count` numbers below 2^32 that look random: steps as of MurmurHash3's finalizer, by multipliers that leave
    products below 2^63."""
    x = torch.arange(count, dtype=torch.int64) * 40503 + seed * 1000003 + 1
    for shift, factor in ((16, 0x45D9F3B), (13, 0x2C1B3C6D), (16, 0x297A2D39)):
        x = (x ^ (x >> shift)) % 2**32 * factor % 2**32
    return x ^ (x >> 15)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, special: bool = False) -> torch.Tensor:
    """Magnitudes of 2^-8 to 2^8 and zeros of both signs; `special`: NaN and infinities as well."""
    count = torch.Size(shape).numel()
    return tiled(_values(min(count, MADE), seed, dtype, special), count).clone().view(shape)


@functools.lru_cache(maxsize=64)
def _values(count: int, seed: int, dtype: torch.dtype, special: bool) -> torch.Tensor:
    mixed = words(count, seed)
    sign = (mixed >> 23) % 2 * SIGN
    bits = sign + ((119 + words(count, seed + 500) % 16) << 23) + mixed % (1 << 23)
    bits = torch.where(torch.arange(count) % 11 == 3, sign, bits)
    result = torch.where(bits >= SIGN, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    if special:
        for at, value in enumerate((float("nan"), float("inf"), -float("inf"), 3e38, 1e-42)):
            result[100 * at + 7 :: 1009] = value
    return result.to(dtype)


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of [-1, 1)."""
    count = torch.Size(shape).numel()
    return tiled((words(min(count, MADE), seed).double() / 2**31 - 1).float(), count).view(shape)


def short(*shape: int, seed: int = 0, largest: float | None = None) -> torch.Tensor:
    """Multiples of 1/8 in [-2, 2], of which sums of products are exact. `largest`: the first value instead."""
    count = torch.Size(shape).numel()
    result = tiled((words(min(count, MADE), seed) % 33 - 16).float() / 8, count).clone().view(shape)
    if largest is not None:
        result.view(-1)[0] = largest
    return result


def whole(rows: int, cols: int, format: str, seed: int = 0) -> torch.Tensor:
    """Whole numbers that codes of the format hold, with the largest of them in each run of 16 of a row or column:
    sums of their products are exact."""
    # An amax of 2688 gives NVFP4 scales of 1 and 448.
    unit, steps = (224, (0, 1, 2, 3, 4, 6, 8, 12)) if info_of(format).code_bits == 4 else (1, range(8))
    steps = torch.tensor(list(steps), dtype=torch.float32)
    mixed = words(rows * cols, seed)
    made = (steps[mixed % 8] * ((mixed >> 8) % 2 * 2 - 1)).view(rows, cols)
    i, j = torch.arange(rows)[:, None], torch.arange(cols)
    return unit * torch.where((i + j) % 16 == 0, steps[-1], made)


def fit(format: str, rows: int) -> int:
    """The next number of rows that a matrix of the format can have."""
    columnwise = info_of(format).columnwise
    block = columnwise.block_rows if columnwise is not None else 1
    return -(-rows // block) * block


def emulated(format: str) -> str:
    """The format whose linears multiply dequantized codes."""
    return f"{format[:-1]},emulate]" if format.endswith("]") else f"{format}[emulate]"
