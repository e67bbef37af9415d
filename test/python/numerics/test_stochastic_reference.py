"""The oracle of stochastic rounding: its generator's known answers, its codes, its mean error."""

import math

import pytest
import torch
from reference import float4, stochastic
from reference.formats import FORMATS, VARIANTS, decode
from reference.layout import Layout
from reference.quantize import dequantize, quantize

FORMATS_OF_CODES = ["float8_tensorwise", "nvfp4"]
KEY = stochastic.key_of(0x12345678, 0x7ABCDEF0)


def decoded(codes, format):
    return (float4.decode if format.code_bits == 4 else decode)(codes)


# Random123's kat_vectors for philox4x32, 10 rounds.
@pytest.mark.parametrize(
    "counter, key, words",
    [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0_A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, words):
    assert [int(w) for w in stochastic.philox([torch.tensor(c) for c in counter], key)] == words


def test_words_depend_on_the_logical_element_alone():
    format = FORMATS["float8_tensorwise"]
    whole = stochastic.words_of(Layout.whole(format, 11, 7), KEY, 3)
    for offset in range(11):
        shard = Layout(format, 4, 7, 11, 11, offset)
        words = stochastic.words_of(shard, KEY, 3)
        assert torch.equal(words, whole[offset : offset + 4])
    elements = torch.tensor([0, 2**34 + 1, 2**40 + 6])  # counters of two words
    words = stochastic.random_words(KEY, 3, elements)
    for element, word in zip(elements.tolist(), words.tolist()):
        counter = [element // 4 % 2**32, element // 4 // 2**32, 3, 0]
        expected = stochastic.philox([torch.tensor(c) for c in counter], KEY)[element % 4]
        assert word == int(expected)


@pytest.mark.parametrize("name", FORMATS_OF_CODES)
def test_codes_stay_and_ends_saturate(name):
    format = FORMATS[name]
    values = stochastic.code_values(format)
    codes = torch.arange(len(values), dtype=torch.uint8)
    sign = 1 << (format.code_bits - 1)
    for word in (0, 2**31, 2**32 - 1):
        words = torch.full(values.shape, word)
        assert torch.equal(stochastic.encode(values, torch.ones(()), format, words), codes)
        assert torch.equal(stochastic.encode(-values, torch.ones(()), format, words), codes | sign)
        ends = torch.tensor([values[-1] * 1.01, 1e38, math.inf, math.nan])
        got = stochastic.encode(ends, torch.ones(()), format, torch.full((4,), word))
        assert got.tolist() == [len(values) - 1] * 3 + [sign - 1]


@pytest.mark.parametrize("name", FORMATS_OF_CODES)
def test_goes_up_in_that_fraction_of_all_draws(name):
    format = FORMATS[name]
    values = stochastic.code_values(format)
    draws = torch.arange(2**12) << 20  # evenly over all words
    for lower, (a, b) in enumerate(zip(values.tolist(), values[1:].tolist())):
        for eighths in range(8):
            x = torch.full(draws.shape, a + (b - a) * eighths / 8)
            codes = stochastic.encode(x, torch.ones(()), format, draws)
            assert codes.unique().tolist() == ([lower, lower + 1] if eighths else [lower])
            assert (codes - lower).sum() == len(draws) * eighths / 8


@pytest.mark.parametrize("name", [*FORMATS, *VARIANTS])
def test_only_codes_are_rounded_stochastically(name):
    values = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    layout = Layout.whole((FORMATS | VARIANTS)[name], 40, 50)
    image, grid = quantize(values, layout)
    stochastic_image, stochastic_grid = quantize(values, layout, rounding=(KEY, 1))
    assert torch.equal(grid, stochastic_grid)
    first = layout.row_scale_offset
    for at in range(0, layout.row_bytes, layout.image_row_bytes):
        scales = slice(at + first, at + layout.image_row_bytes)
        assert torch.equal(image[:, scales], stochastic_image[:, scales])
    assert (image[:, :first] != stochastic_image[:, :first]).float().mean() > 0.1


@pytest.mark.parametrize("name", list(FORMATS))
def test_mean_error_tends_to_zero(name):
    """One draw's error has a standard deviation of at most half an ulp."""
    draws = 400
    format = FORMATS[name]
    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).double()
    layout = Layout.whole(format, 16, 32)
    total = torch.zeros_like(values)
    upper = torch.full_like(values, -math.inf)
    lower = torch.full_like(values, math.inf)
    for count in range(draws):
        image, grid = quantize(values.float(), layout, rounding=(KEY, count))
        read = dequantize(image, grid, layout, torch.float32).double()
        total += read
        upper, lower = upper.maximum(read), lower.minimum(read)
    inside = (lower < values) & (values < upper)  # not what is a code, or saturates
    assert inside.float().mean() > 0.8
    ulp = (upper - lower)[inside]
    error = (total / draws - values.float().double())[inside] / ulp
    assert error.abs().max() <= 5 / (2 * draws**0.5)
    assert error.mean().abs() <= 5 / (2 * (draws * len(error)) ** 0.5)
