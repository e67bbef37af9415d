"""Stochastic rounding of codes: which random word an element gets, and how it is rounded by that.

Element i = logical row * cols + column takes word i % 4 of Philox 4x32-10 of the counter
(low word of i / 4, high word of i / 4, count, 0) under a 64-bit key.

A value between two codes becomes the upper one where the word's 24 high bits, as a fraction, are
below its distance from the lower one, in ulps. The codes' values stay; what is above the largest
becomes it, infinity too.
"""

import torch

from . import float4
from .formats import Format, decode
from .layout import Layout

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a 64-bit product, of which int64 holds no more than 63 bits."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high << 16) & WORD) | (low & 0xFFFF)


def philox(counter: list[torch.Tensor], key: int, rounds: int = 10) -> list[torch.Tensor]:
    """Four words, in int64 as everything here, of four words of counters."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & WORD, key >> 32
    for _ in range(rounds):
        high0, low0 = multiply(MULTIPLIERS[0], c0)
        high1, low1 = multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return [c0, c1, c2, c3]


def key_of(low: int, high: int) -> int:
    """The key of the two non-negative int32 that kernels are given."""
    return low | high << 31


def random_words(key: int, count: int, elements: torch.Tensor) -> torch.Tensor:
    """The words of elements with these logical indices."""
    quad = elements // 4
    zero = torch.zeros_like(quad)
    words = philox([quad & WORD, quad >> 32, zero + count, zero], key)
    return torch.stack(words).gather(0, (elements % 4)[None])[0]


def words_of(layout: Layout, key: int, count: int) -> torch.Tensor:
    """The words of a shard's live elements."""
    first = 0 if layout.row_offset is None else layout.row_offset * layout.cols
    elements = first + torch.arange(layout.live_rows * layout.cols)
    return random_words(key, count, elements).view(layout.live_rows, layout.cols)


def code_values(format: Format) -> torch.Tensor:
    """Values of the codes without a sign, NaN left out; the code is the index."""
    if format.code_bits == 4:
        return torch.tensor(float4.VALUES)
    return decode(torch.arange(0x7F, dtype=torch.uint8))


def encode(x: torch.Tensor, scale: torch.Tensor, format: Format, words: torch.Tensor):
    """uint8 codes of x * scale, unpacked; NaN is all ones, and the sign is kept, NaN's too."""
    x = x.float()
    scaled = (x * scale).abs().double()  # differences of such numbers are exact
    return round_codes(x, scaled, (words >> 8).double() / 2**24, format)


def round_codes(x: torch.Tensor, scaled: torch.Tensor, draw: torch.Tensor, format: Format):
    """Codes of magnitudes in fp64, that go up where `draw` is below their distance; signs and NaN are x's."""
    values = code_values(format).double()
    top = len(values) - 1
    lower = (torch.searchsorted(values, scaled, right=True) - 1).clamp(max=top)
    upper = (lower + 1).clamp(max=top)
    distance = (scaled - values[lower]) / (values[upper] - values[lower])
    code = torch.where(draw < distance, upper, lower).to(torch.uint8)
    sign_bit = format.code_bits - 1
    code[x.isnan()] = 2**sign_bit - 1
    return code | (x.signbit().to(torch.uint8) << sign_bit)
