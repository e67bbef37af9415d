"""Formats of rows that hold all that they stand for, and such rows as bytes: `row_image`, `from_row_image`."""

import pytest
import torch
from arrived_rows import ON_DEVICES, ROWS, ROWS_OF_MX, WHOLE_ROWS, bits, odd_values, values
from helpers import assert_same
from reference import activations, emulation

from qshard.formats import info_of

ops = torch.ops.qshard


@ON_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(40, 300), (128, 16), (130, 257), (64, 9000), (0, 128), (3, 0)])
@pytest.mark.parametrize("format", [ROWS, WHOLE_ROWS])
def test_rows_are_the_packed_codes_of_an_input(format, shape, dtype, device):
    x = values(*shape, dtype) if shape[0] < 40 else odd_values(*shape).to(dtype)
    q = ops.quantize(x.to(device), format)
    if format == ROWS:
        codes, scale_inv = activations.quantize_1x128(x)
        of_columns = activations.expand_1x128(scale_inv, shape[1])
    else:
        codes, scale_inv = activations.quantize_rowwise(x)
        scale_inv = of_columns = scale_inv[:, None][:, : shape[1]]
    assert_same(bits(ops.codes(q)).cpu(), codes)
    assert_same(ops.scale_inv(q).float().cpu(), scale_inv)
    blocks = scale_inv.shape[1]
    assert not ops.row_image(q)[:, shape[1] : -(-shape[1] // 16) * 16].any()
    assert not ops.row_image(q)[:, -(-shape[1] // 16) * 16 + blocks :].any()
    expected = emulation.decoded(codes, torch.float8_e4m3fn) * of_columns.double()
    assert_same(ops.dequantize(q, dtype=torch.float32).cpu(), expected.float())


@ON_DEVICES
@pytest.mark.parametrize("columns", [64, 300])
def test_rows_may_be_rounded_stochastically(columns, device):
    """To a neighbour of each value, by the scale that rows rounded to nearest have."""
    q = ops.quantize(values(40, columns).to(device), f"{WHOLE_ROWS}[stochastic]").requires_grad_()
    q.grad = torch.randn(40, columns, device=device) * ops.scale_inv(q.detach()).float()
    x = (q.detach() + 0) - q.grad
    torch.optim.SGD([q], lr=1.0).step()
    nearest, q = ops.quantize(x, WHOLE_ROWS), q.detach()
    assert_same(bits(ops.scale_inv(q)), bits(ops.scale_inv(nearest)))
    error = (ops.dequantize(q) - x).abs()
    step = torch.maximum(x.abs() * 2.0**-3, ops.scale_inv(nearest).float() * 2.0**-9)
    assert (error <= step).all() and (error > (ops.dequantize(nearest) - x).abs()).any()


def test_formats_of_rows_are_named_by_those_of_weights():
    named = {name: info_of(name).activations.row_format for name in ops.formats()}
    assert named["float8_blockwise"] == info_of("float8_blockwise[emulate]").activations.row_format == ROWS
    assert named["mxfp8"] == named["mxfp8_1x32"] == ROWS_OF_MX
    assert named["float8_tensorwise"] == named["float8_rowwise"] == WHOLE_ROWS
    without = ["float8_delayed", *(f"float8_{of}wise_fp32_scale" for of in ("block", "tensor", "row"))]
    assert not any(named[format] for format in without)
    for rows in (ROWS, WHOLE_ROWS):
        assert info_of(rows).base == rows and rows not in ops.formats()
        assert info_of(rows).activations.row_format == rows
    assert info_of(ROWS_OF_MX).base == "mxfp8_1x32" and info_of(ROWS_OF_MX).columnwise is None


@ON_DEVICES
@pytest.mark.parametrize("format, row_bytes", [(ROWS, 304 + 16), (ROWS_OF_MX, 304 + 16), (WHOLE_ROWS, 304 + 16)])
def test_rows_travel_as_bytes(format, row_bytes, device):
    x = odd_values(40, 300).to(device, torch.bfloat16)
    q = ops.quantize(x, format)
    image = ops.row_image(q)
    assert image.shape == (40, row_bytes) and image.dtype is torch.uint8
    order = torch.randperm(40, device=device)
    arrived = ops.from_row_image(image[order], format, columns=300, dtype=torch.bfloat16)
    assert ops.format(arrived) == format and arrived.dtype is torch.bfloat16
    assert_same(ops.row_image(arrived), image[order])
    assert_same(ops.dequantize(arrived), ops.dequantize(q)[order])
    assert_same(ops.row_image(q[7:20]), image[7:20])
    image.zero_()  # an alias of q, of which `arrived` has copies
    assert not ops.dequantize(q).any() and ops.dequantize(arrived).any()


@ON_DEVICES
@pytest.mark.parametrize("format", [ROWS, ROWS_OF_MX, WHOLE_ROWS])
def test_picked_rows_stay_codes(format, device):
    q = ops.quantize(odd_values(40, 300).to(device), format)
    index = torch.tensor([3, -1, 3, 0], device=device)
    mask = torch.arange(40, device=device) % 3 == 0
    for picked, rows in (
        (q[index], index), (q.index_select(0, index % 40), index), (q[5:][index], index % 35 + 5),
        (q[mask], mask), (q[index[:0]], index[:0]),
    ):
        assert ops.format(picked) == format
        assert_same(bits(ops.row_image(picked)), bits(ops.row_image(q)[rows]))
    batch = ops.quantize(values(12, 64).view(3, 4, 64).to(device), format)
    assert_same(ops.dequantize(batch[index[1::2]]), ops.dequantize(batch)[index[1::2]])
    with_master = ops.quantize(values(40, 300).to(device), format, keep_master=True)
    assert not ops.is_quantized(with_master[index]) and not ops.is_quantized(q[:, index])


def test_rows_that_are_none():
    image = ops.row_image(ops.quantize(values(4, 64), ROWS))
    for weight in (ops.quantize(torch.randn(32, 32), format) for format in ("float8_rowwise", "mxfp8", "mxfp8_1x32")):
        with pytest.raises(ValueError, match="qshard::row_image: rows of .* share scales or have two images"):
            ops.row_image(weight)
    with pytest.raises(ValueError, match="qshard::from_row_image: rows of nvfp4 share scales"):
        ops.from_row_image(image, "nvfp4", columns=64)
    with pytest.raises(ValueError, match=r"a row of 300 float8_1x128 columns has 320 bytes, got an image of shape \[4, 80\]"):
        ops.from_row_image(image, ROWS, columns=300)
    with pytest.raises(TypeError, match="expected a plain uint8 tensor"):
        ops.from_row_image(image.float(), ROWS, columns=64)
    with pytest.raises(TypeError, match="dtype must be|expected dtype"):
        ops.from_row_image(image, ROWS, columns=64, dtype=torch.float64)
    with pytest.raises(ValueError, match="not a window of whole rows"):
        ops.row_image(ops.quantize(values(4, 64), ROWS)[:, :16])


def test_writes_through_the_image_are_noticed():
    """Autograd refuses a backward of rows that were written, as of any tensor that it saved."""
    rows = ops.quantize(torch.randn(48, 256), "float8_1x128")
    weight = ops.quantize(torch.randn(32, 256), "float8_blockwise").requires_grad_()
    for bytes in (ops.row_image(rows), ops.codes(rows).view(torch.uint8)):
        y = torch.nn.functional.linear(rows, weight)
        bytes.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
