"""The library's row images, grids and values against the plain-torch oracle, byte for byte."""

import pytest
import torch
from reference.formats import FORMATS
from reference.layout import Layout
from reference.quantize import dequantize, quantize

OPS = torch.ops.qshard
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    (1, 1),
    (128, 128),
    (256, 384),
    (300, 200),
    (129, 31),
    (5, 0),
    (0, 16),
    (3, 130, 72),
    (2, 128, 16),
]


def check(values: torch.Tensor, format: str, device: str) -> None:
    """Quantizes on `device` and compares every byte with the oracle."""
    *_, matrix_rows, cols = values.shape
    rows = values.reshape(values.shape[:-1].numel(), cols)
    layout = Layout(FORMATS[format], len(rows), cols, len(rows), matrix_rows, 0)
    image, grid = quantize(rows, layout)

    q = OPS.quantize(values.to(device), format)
    scale_inv = OPS.scale_inv(q).cpu().reshape(layout.grid_shape)
    assert torch.equal(scale_inv, grid)

    codes = OPS.codes(q).view(torch.uint8)
    assert torch.equal(codes.cpu().reshape(len(rows), cols), image[:, :cols])
    if codes.numel():
        padded = codes.as_strided((len(rows), layout.row_bytes), (layout.row_bytes, 1))
        assert torch.equal(padded.cpu(), image)

    expected = dequantize(image, grid, layout, values.dtype).reshape(values.shape)
    got = OPS.dequantize(q).cpu()
    assert got.dtype == values.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_values(shape, format, dtype, device):
    torch.manual_seed(0)
    values = torch.randn(shape) * 10 ** torch.randn(*shape[:-1], 1)
    values[torch.rand(shape) < 0.05] = 0
    check(values.to(dtype), format, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "special", [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-45, -6e-8, 3e38, 448.0]
)
def test_special_values(special, format, dtype, device):
    for rest in (0.0, 1.0, 1e-40):
        values = torch.full((130, 140), rest)
        values[0, 3] = values[129, 139] = special
        check(values.to(dtype), format, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_amax_beside_powers_of_two(format, device):
    for exponent in (-149, -130, -30, -9, -6, 0, 8, 30, 127):
        base = torch.tensor(1.0).ldexp(torch.tensor(exponent))
        for x in (base, base.nextafter(torch.tensor(0.0)), base.nextafter(torch.tensor(3e38))):
            for mantissa in (1.0, 1.75):
                check((torch.linspace(0, 1, 33) * (x * mantissa))[None], format, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_ties_round_to_even(format, device):
    codes = torch.arange(0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[:-1] + codes[1:]) / 2
    values = torch.cat([ties, -ties, codes, torch.tensor([448.0])])
    check(values[None], format, device)
