"""The library's row images, grids and values against the plain-torch oracle, byte for byte."""

import pytest
import torch
from reference import float4, formats
from reference.layout import Layout, ceil_div, round_up
from reference.quantize import (
    combine_amax,
    compute_amax,
    dequantize,
    dequantize_columnwise,
    quantize,
    unsliced,
)

BUDGET_S = 60
OPS = torch.ops.qshard
FORMATS = formats.FORMATS | formats.VARIANTS
MANY_VALUES = 3_400_000  # of each dtype: 10 million a format
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    (1, 1),
    (128, 128),
    (256, 384),
    (300, 200),
    (129, 31),
    (40, 33),
    (5, 0),
    (0, 16),
    (3, 130, 72),
    (2, 128, 16),
    (2, 3, 17, 50),
]
FLT_MAX = torch.finfo(torch.float32).max
INT_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


# -------------------------------------------------------------------------------- comparing


def check(values: torch.Tensor, format: str, device: str) -> None:
    """Quantizes on `device` and compares every byte with the oracle. Rows are added where the format
    asks for whole blocks."""
    if FORMATS[format].columnwise:
        missing = -values.shape[-2] % FORMATS[format].columnwise.block[0]
        values = torch.nn.functional.pad(values, (0, 0, 0, missing))
    *_, matrix_rows, cols = values.shape
    rows = values.reshape(values.shape[:-1].numel(), cols)
    layout = Layout(FORMATS[format], len(rows), cols, len(rows), matrix_rows, 0)
    image, grid = quantize(rows, layout)

    # Without a master a columnwise image is of what the rowwise one shows.
    two_images = layout.format.columnwise is not None
    q = OPS.quantize(values.to(device), format, keep_master=two_images)
    check_scales(q, image, grid, layout)
    check_codes(q, image, layout)

    expected = dequantize(image, grid, layout, values.dtype).reshape(values.shape)
    got = OPS.dequantize(q).cpu()
    assert got.dtype == values.dtype
    assert same_bits_or_nan(got, expected)
    if layout.format.row_scale:
        assert not got[got.isnan()].signbit().any()
    if layout.format.columnwise:
        check_columnwise(q, image, layout)
    else:
        for accessor in (OPS.columnwise_codes, OPS.columnwise_scale_inv):
            with pytest.raises(ValueError, match="has one row image"):
                accessor(q)


def check_columnwise(q, image, layout):
    values = dequantize_columnwise(image, layout, torch.float32)
    image, layout = image[:, layout.image_row_bytes :], layout.columnwise
    codes, scale_inv = OPS.columnwise_codes(q), OPS.columnwise_scale_inv(q)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == q.shape
    codes = codes.view(torch.uint8).cpu().reshape(len(image), layout.cols)
    assert torch.equal(codes, image[:, : layout.cols])
    *leading, rows, cols = q.shape
    assert scale_inv.dtype == torch.float8_e8m0fnu and scale_inv.shape == (*leading, rows // 32, cols)
    scale_bytes = scale_inv.view(torch.uint8).cpu().reshape(len(image) // 32, cols)
    scale_bytes = scale_bytes.repeat_interleave(32, 0)
    slices = image[:, layout.row_scale_offset :][:, : layout.row_scale_bytes]
    assert torch.equal(scale_bytes, unsliced(slices, layout))
    if q.numel():  # beside the rowwise image
        assert OPS.columnwise_codes(q).data_ptr() == OPS.codes(q).data_ptr() + layout.image_row_bytes
    # What dgrad multiplies by; GEMMs of the other dtypes lose the smallest numbers.
    if q.dim() == 2 and len(image) <= 512 and q.dtype == torch.float32 and values.isfinite().all():
        identity = torch.eye(len(image), device=q.device)
        assert torch.equal(torch.mm(identity, q).cpu(), values)


def check_codes(q, image, layout):
    codes = OPS.codes(q)
    packed = layout.format.code_bits == 4
    assert codes.dtype == (torch.uint8 if packed else torch.float8_e4m3fn)
    assert codes.shape == (*q.shape[:-1], layout.code_bytes)
    codes = codes.view(torch.uint8)
    expected = image[:, : layout.code_bytes]
    assert torch.equal(codes.cpu().reshape(expected.shape), expected)
    if codes.numel():  # and all the bytes around them
        padded = codes.as_strided((len(image), layout.row_bytes), (layout.row_bytes, 1))
        assert torch.equal(padded.cpu(), image)


def check_scales(q, image, grid, layout):
    scale_inv = OPS.scale_inv(q)
    if layout.format.tensor_scale:
        tensor_scale_inv = OPS.tensor_scale_inv(q)
        assert tensor_scale_inv.dtype == torch.float32
        assert torch.equal(tensor_scale_inv.cpu().reshape(layout.grid_shape), grid)
        if q.numel():
            assert tensor_scale_inv.shape == (*q.shape[:-2], 1, 1)
    else:
        with pytest.raises(ValueError, match="no scale above"):
            OPS.tensor_scale_inv(q)
    if not layout.format.row_scale:
        assert torch.equal(scale_inv.cpu().reshape(layout.grid_shape), grid)
        return
    assert scale_inv.dtype == layout.format.row_scale
    assert scale_inv.shape == (*q.shape[:-1], layout.block_shape[1])
    width = layout.block_shape[1]
    scale_bytes = scale_inv.view(torch.uint8).cpu().reshape(len(image), width)
    assert torch.equal(scale_bytes, image[:, layout.row_scale_offset :][:, :width])
    if q.numel():  # a view of the image
        assert scale_inv.data_ptr() == OPS.codes(q).data_ptr() + layout.row_scale_offset
        assert scale_inv.stride(-1) == 1
        assert q.shape[-2] == 1 or scale_inv.stride(-2) == layout.row_bytes


def same_bits_or_nan(a, b):
    def bits(x):
        return torch.where(x.isnan(), float("nan"), x).view(INT_OF[x.dtype])

    return torch.equal(bits(a), bits(b))


# ------------------------------------------------------------------------------------ values


def neighbours(x):
    """x > 0, and the next values of its dtype to both sides."""
    bits = x.view(INT_OF[x.dtype])
    return torch.cat([x, (bits - 1).view(x.dtype), (bits + 1).view(x.dtype)])


def code_values(format):
    """The finite values of the format's codes, from 0 up."""
    if FORMATS[format].code_bits == 4:
        return torch.tensor(float4.VALUES)
    return torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def midpoints(x):
    return (x[:-1] + x[1:]) / 2


def in_blocks(x, first, width):
    """(1, n) holding x in blocks of `width` columns, each beginning with `first`."""
    x = torch.nn.functional.pad(x, (0, -len(x) % (width - 1))).view(-1, width - 1)
    return torch.nn.functional.pad(x, (1, 0), value=first).view(1, -1)


def wide_values(shape, dtype):
    """Matrices, and tiles of 16 x 16 in them, of all the sizes that the dtype has."""
    matrices, rows, cols = shape
    limits = torch.finfo(dtype)
    lowest, highest = torch.tensor([limits.smallest_normal, limits.max]).log2().int().tolist()
    tiles = torch.randint(-16, 1, (matrices, ceil_div(rows, 16), ceil_div(cols, 16)))
    tiles = tiles.repeat_interleave(16, 1)[:, :rows].repeat_interleave(16, 2)[..., :cols]
    exponents = torch.randint(lowest, highest - 3, (matrices, 1, 1)) + tiles
    values = (torch.randn(shape).double() * 2.0 ** exponents.double()).to(dtype)
    values[torch.rand(shape) < 0.02] = 0
    return values


# ------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_values_have_the_codes_of_the_oracle(shape, format, dtype, device):
    torch.manual_seed(0)
    values = torch.randn(shape) * 10 ** torch.randn(*shape[:-1], 1)
    values[torch.rand(shape) < 0.05] = 0
    check(values.to(dtype), format, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_many_values_have_the_codes_of_the_oracle(format, dtype, device):
    torch.manual_seed(1)
    many = MANY_VALUES // 10 if format in formats.VARIANTS else MANY_VALUES
    shape = (ceil_div(many, 357 * 353), 357, 353)
    values = wide_values(shape, dtype)
    check(values, format, device)
    values.view(-1)[torch.randint(values.numel(), (20,))] = float("nan")
    values.view(-1)[torch.randint(values.numel(), (20,))] = float("inf")
    check(values, format, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "special",
    [float("inf"), -float("inf"), float("nan"), -float("nan")]
    + [0.0, -0.0, 1e-45, -6e-8, 3e38, 448.0, FLT_MAX, -FLT_MAX, 65504.0],
)
def test_special_values_have_the_codes_of_the_oracle(special, format, dtype, device):
    for rest in (0.0, 1.0, 1e-40):
        values = torch.full((130, 140), rest)
        values[0, 3] = values[129, 139] = special
        check(values.to(dtype), format, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_amax_beside_powers_of_two(format, dtype, device):
    """And beside the powers of two that are 448 and 6 * 448 times a scale; a matrix for each."""
    mantissas = (1, 448 / 256, 2688 / 2048)
    powers = torch.tensor([m * 2.0**e for e in range(-149, 128) for m in mantissas]).to(dtype)
    amaxes = neighbours(powers[(powers > 0) & powers.isfinite()])
    fractions = torch.linspace(-1, 1, 67)
    check((amaxes.float()[:, None, None] * fractions).to(dtype), format, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale", [1, 2.0**-7, 2.0**5])
def test_ties_round_to_even(scale, format, dtype, device):
    codes = code_values(format)
    points = torch.cat([codes[1:], midpoints(codes)])
    points = torch.cat([neighbours(points), -neighbours(points)])
    values = in_blocks(points, codes[-1], (FORMATS[format].block or (1, 128))[1] or 128)
    if FORMATS[format].tensor_scale:  # makes it a power of two
        values = torch.cat([torch.full((1, 16), 448 * codes[-1]), values], 1)
    check((values * scale).to(dtype), format, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tensor_amax", [2688.0, 1.0, 1e30, 1e-30])
def test_block_scales_at_ties(tensor_amax, device):
    """nvfp4: the amax of a block makes an E4M3 scale, or lies halfway between two."""
    scales = code_values("mxfp8")
    amaxes = neighbours(torch.cat([scales[1:], midpoints(scales)]) * (tensor_amax / 448))
    amaxes = torch.cat([torch.tensor([tensor_amax]), amaxes[amaxes <= tensor_amax]])
    values = amaxes[:, None] * torch.linspace(-1, 1, 16)
    check(values.view(1, -1), "nvfp4", device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", [f.name for f in FORMATS.values() if f.power_of_two_scales])
def test_values_survive_another_quantization(format, device):
    torch.manual_seed(2)
    rows = 96 if FORMATS[format].columnwise else 77
    for dtype in DTYPES:
        values = torch.randn(3, rows, 90).to(dtype)
        if dtype == torch.float32:  # the others lack small enough numbers
            values = torch.cat([values, wide_values((300, rows, 90), dtype)])
            values[5, 3, 4], values[6, 50, 60] = float("nan"), float("inf")
        once = OPS.dequantize(OPS.quantize(values.to(device), format))
        twice = OPS.dequantize(OPS.quantize(once, format))
        assert same_bits_or_nan(once, twice)


@pytest.mark.parametrize("device", DEVICES)
def test_nvfp4_values_survive_where_the_scale_is_normal(device):
    torch.manual_seed(3)
    values = wide_values((300, 77, 90), torch.float32)
    values = values[values.abs().amax((1, 2)) > 2688 * 2.0**-122]  # else S / scale is above FLT_MAX
    values[5, 3, 4], values[6, 50, 60] = float("nan"), float("inf")
    q = OPS.quantize(values.to(device), "nvfp4")
    once = OPS.dequantize(q)
    q2 = OPS.quantize(once, "nvfp4")
    twice = OPS.dequantize(q2)
    scales, scales2 = (OPS.scale_inv(x).view(torch.uint8) for x in (q, q2))
    normal = scales >= 8
    assert normal.float().mean() > 0.5
    assert torch.equal(scales[normal], scales2[normal])
    elements = normal.repeat_interleave(16, 2)[..., :90]
    assert same_bits_or_nan(once[elements], twice[elements])
    assert torch.equal(OPS.tensor_scale_inv(q), OPS.tensor_scale_inv(q2))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 33, 97, 256])
def test_the_oracle_gives_the_same_rows_however_they_are_cut(rows, format):
    torch.manual_seed(4)
    if FORMATS[format].columnwise:
        rows = round_up(rows, 32)
    values = torch.randn(rows, 50) * 10 ** torch.randn(rows, 1)
    values[rows // 2, 3], values[rows - 1, 49] = float("nan"), float("inf")
    image, grid = quantize(values, Layout.whole(FORMATS[format], rows, 50))
    for ranks in (1, 2, 3, 7, 16):
        held = ceil_div(rows, ranks)
        shards = []
        for rank in range(ranks):
            live = values[rank * held : (rank + 1) * held]
            padded = torch.nn.functional.pad(live, (0, 0, 0, held - len(live)), value=1e9)
            shards.append((padded, Layout(FORMATS[format], held, 50, rows, rows, rank * held)))
        agreed = combine_amax([compute_amax(*shard, ranks) for shard in shards])
        results = [quantize(*shard, agreed, ranks) for shard in shards]
        gathered = torch.cat([shard_image for shard_image, _ in results])
        assert torch.equal(gathered[:rows], image)
        assert not gathered[rows:].any()
        assert all(torch.equal(shard_grid, grid) for _, shard_grid in results)
