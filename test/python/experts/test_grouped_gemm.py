"""The GEMMs of experts on Hopper, `_grouped_gemm`, against sums in float64 by plain torch.

Operands are codes of E4M3 with scales in blocks, as linears of `float8_blockwise` have them. Bytes
that no group owns are NaNs.
"""

import pytest
import torch
from helpers import ceil_div, ops, round_up

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")
NAN = 0x7F
TILE_ROWS = (64, 128, 256)
# (N, K, rows after the last group); a row of codes is a multiple of 16.
SIZES = [(256, 256, 0), (208, 400, 5), (528, 144, 300), (100, 512, 77), (8, 16, 1)]
EMPTY = ("none", "first", "middle", "last", "all")


def groups_of(count, empty, mean):
    """Their rows, any number of them."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(1, 2 * mean, (count,), generator=generator)
    where = {"first": 0, "middle": count // 2, "last": -1, "all": slice(None)}
    if empty in where:
        rows[where[empty]] = 0
    return rows.tolist()


def starts_of(rows, to=1):
    """Where each group begins in units of `to` rows, and where the last one ends."""
    starts = [0]
    for count in rows:
        starts.append(starts[-1] + round_up(count, to))
    return starts


def offs_of(ends):
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def scales_of(amax):
    """Powers of two by which the largest value is at most 448."""
    return torch.where(amax > 0, torch.exp2((amax / 448).log2().ceil()), 1.0)


def by_rows(x):
    """Codes (R, C to 16) and scales (C / 128, R to 16) of x (R, C)."""
    rows, columns = x.shape
    blocks = ceil_div(columns, 128)
    padded = torch.nn.functional.pad(x, (0, blocks * 128 - columns)).view(rows, blocks, 128)
    scales = scales_of(padded.abs().amax(2))
    codes = (padded / scales[:, :, None]).flatten(1)[:, : round_up(columns, 16)]
    laid_out = x.new_full((blocks, round_up(rows, 16)), float("nan"))
    laid_out[:, :rows] = scales.t()
    return codes.to(torch.float8_e4m3fn).contiguous(), laid_out


def by_squares(x):
    """Codes (E, R, C to 16) and scales (E, R / 128, C / 128) of x (E, R, C)."""
    count, rows, columns = x.shape
    grid = ceil_div(rows, 128), ceil_div(columns, 128)
    margins = (0, grid[1] * 128 - columns, 0, grid[0] * 128 - rows)
    tiles = torch.nn.functional.pad(x, margins).view(count, grid[0], 128, grid[1], 128)
    scales = scales_of(tiles.abs().amax((2, 4)))
    codes = (tiles / scales[:, :, None, :, None]).flatten(3).flatten(1, 2)
    codes = codes[:, :rows, : round_up(columns, 16)]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales


def values_by_rows(codes, scales):
    rows, columns = codes.shape
    by_code = scales[:, :rows].t().repeat_interleave(128, 1)[:, :columns]
    return codes.double() * by_code.double()


def values_by_squares(codes, scales):
    by_code = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes.double() * by_code[..., : codes.shape[-2], : codes.shape[-1]].double()


def assert_near(got, a, b):
    """That got is a @ b^T: the cores' sums keep 14 bits, and bfloat16 8."""
    exact = a @ b.t()
    allowed = 2**-12 * (a.abs() @ b.abs().t()) + 2**-8 * exact.abs()
    assert ((got.double() - exact).abs() <= allowed).all()


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def rows_with_nans(rows, columns, live):
    """Codes and scales of random rows; those from `live` on are NaNs."""
    codes, scales = by_rows(torch.randn(rows, columns, device="cuda"))
    codes.view(torch.uint8)[live:] = NAN
    scales[:, live:] = float("nan")
    return codes, scales


def stack_of(count, rows, columns):
    """Codes and scales of matrices, each larger than the one before."""
    sizes = 4.0 ** torch.arange(count, device="cuda").clamp(max=8)
    return by_squares(torch.randn(count, rows, columns, device="cuda") * sizes[:, None, None])


def forward(x, weight, offs, **kwargs):
    return ops._grouped_gemm(*x, *weight, offs, **kwargs)


def columns_of(x, rows, square):
    """Codes and scales of x's columns, in which a group begins at a multiple of 128."""
    starts, padded = starts_of(rows), starts_of(rows, 128)
    width = round_up(x.shape[0], 128) + 128 * len(rows)
    columns = x.new_zeros(x.shape[1], width)
    for count, start, at in zip(rows, starts, padded):
        columns[:, at : at + count] = x[start : start + count].t()
    if not square:
        return by_rows(columns)
    codes, scales = by_squares(columns[None])
    return codes[0], torch.nn.functional.pad(scales[0], (0, -scales.shape[2] % 4))


# ----------------------------------------------------------------------------- groups of rows


@pytest.mark.parametrize("n, k, tail", SIZES)
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_each_group_is_multiplied_by_its_own_matrix(count, empty, n, k, tail):
    torch.manual_seed(count)
    rows = groups_of(count, empty, 90 if count < 64 else 20)
    starts = starts_of(rows)
    x, weight = rows_with_nans(starts[-1] + tail, k, starts[-1]), stack_of(count, n, k)
    of_x, of_weight = values_by_rows(*x), values_by_squares(*weight)
    results = [forward(x, weight, offs_of(starts[1:]), tile_rows=t) for t in (0, *TILE_ROWS)]
    for result in results:
        assert result.shape == (starts[-1] + tail, n) and result.dtype == torch.bfloat16
        assert same_bits(result, results[0])
    for group in range(count):
        own = slice(starts[group], starts[group + 1])
        assert_near(results[0][own], of_x[own], of_weight[group])
    assert not results[0][starts[-1] :].view(torch.int16).any()


@pytest.mark.parametrize("rows", [[300, 0, 1, 513, 70]])
def test_a_group_has_the_same_bits_alone(rows):
    torch.manual_seed(1)
    starts = starts_of(rows)
    x, weight = rows_with_nans(starts[-1] + 9, 384, starts[-1]), stack_of(len(rows), 272, 384)
    together = forward(x, weight, offs_of(starts[1:]))
    for group, count in enumerate(rows):
        own = slice(starts[group], starts[group + 1])
        scales = x[1].new_full((3, round_up(count, 16)), float("nan"))
        scales[:, :count] = x[1][:, own]
        matrix = [plane[group : group + 1].clone() for plane in weight]
        alone = forward((x[0][own].clone(), scales), matrix, offs_of([count]))
        assert same_bits(alone, together[own])


@pytest.mark.parametrize("n, k", [(256, 256), (144, 400), (528, 208), (1168, 48)])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_gradients_of_inputs_contract_the_rows_of_matrices(count, n, k):
    torch.manual_seed(count)
    rows = groups_of(count, "middle", 90)
    starts = starts_of(rows)
    gradient, (codes, scales) = rows_with_nans(starts[-1] + 3, n, starts[-1]), stack_of(count, n, k)
    transposed = codes.view(torch.uint8).transpose(1, 2).contiguous().view(codes.dtype)
    of_gradient, of_weight = values_by_rows(*gradient), values_by_squares(codes, scales)
    weight, offs = (transposed, scales.transpose(1, 2)), offs_of(starts[1:])
    results = [forward(gradient, weight, offs, tile_rows=t) for t in TILE_ROWS]
    for tile_rows in (0, *TILE_ROWS):  # the kernel transposes matrices itself
        results.append(
            forward(gradient, (codes, scales), offs, contract_rows=True, tile_rows=tile_rows)
        )
    more = round_up(2048 * count, 16)  # rows: another kernel transposes them before
    long = torch.nn.functional.pad(gradient[0].view(torch.uint8), (0, 0, 0, more))
    of_long = torch.nn.functional.pad(gradient[1], (0, more))
    result = forward((long.view(codes.dtype), of_long), (codes, scales), offs, contract_rows=True)
    results.append(result[: len(gradient[0])])
    for result in results:
        assert same_bits(result, results[0])
    for group in range(count):
        own = slice(starts[group], starts[group + 1])
        assert_near(results[0][own], of_gradient[own], of_weight[group].t())
    assert not results[0][starts[-1] :].any()


@pytest.mark.parametrize("ends", [[300, 100, 500], [10, 900, 400], [-5, 50, 128], [-1, -2, -3]])
def test_ends_are_clamped_to_the_rows_and_to_the_one_before(ends):
    torch.manual_seed(2)
    x, weight = rows_with_nans(512, 256, 512), stack_of(3, 128, 256)
    clamped, before = [], 0
    for end in ends:
        before = min(max(end, before), 512)
        clamped.append(before)
    assert same_bits(forward(x, weight, offs_of(ends)), forward(x, weight, offs_of(clamped)))


@pytest.mark.parametrize(
    "count, rows, n, k", [(0, 5, 16, 32), (2, 0, 16, 32), (2, 5, 0, 32), (2, 5, 16, 0)]
)
def test_sizes_of_zero(count, rows, n, k):
    x, weight = rows_with_nans(rows, k, rows), stack_of(count, n, k)
    result = forward(x, weight, offs_of([rows] * count))
    assert result.shape == (rows, n) and not result.any()


# ----------------------------------------------------------------- groups of what is contracted


@pytest.mark.parametrize("square", [True, False], ids=["squares", "rows"])
@pytest.mark.parametrize("m, n", [(128, 256), (100, 144), (528, 208)])
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_gradients_of_weights_sum_over_the_rows_of_a_group(count, empty, m, n, square):
    torch.manual_seed(count)
    rows = groups_of(count, empty, 150 if count < 64 else 20)
    tokens = sum(rows) + 7
    gradient = columns_of(torch.randn(tokens, m, device="cuda"), rows, square=False)
    x = columns_of(torch.randn(tokens, n, device="cuda"), rows, square)
    of_gradient = values_by_rows(*gradient)
    of_x = (values_by_squares if square else values_by_rows)(*x)
    offs, padded = offs_of(starts_of(rows)[1:]), starts_of(rows, 128)
    results = [
        ops._grouped_gemm(*gradient, *x, offs, tokens=tokens, square_scales=square, tile_rows=t)
        for t in (0, *TILE_ROWS)
    ]
    for result in results:
        assert result.shape == (count, m, n) and same_bits(result, results[0])
    for group in range(count):
        own = slice(padded[group], padded[group + 1])
        assert_near(results[0][group], of_gradient[:, own], of_x[:, own])
        assert rows[group] or not results[0][group].view(torch.int16).any()


@pytest.mark.parametrize("square", [True, False], ids=["squares", "rows"])
def test_groups_without_columns_sum_nothing(square):
    torch.manual_seed(5)
    rows = [100] * 8  # which 1,024 columns would hold
    values = [torch.randn(800, 128, device="cuda") for _ in "gx"]
    operands = columns_of(values[0], rows, False) + columns_of(values[1], rows, square)
    narrow = [plane[:, :896] for plane in operands]
    narrow[1] = operands[1][:7]
    narrow[3] = operands[3][:, :7] if square else operands[3][:7]
    offs = offs_of(starts_of(rows)[1:])
    whole, part = (
        ops._grouped_gemm(*planes, offs, tokens=800, square_scales=square)
        for planes in (operands, narrow)
    )
    assert same_bits(part[:7], whole[:7]) and not part[7].any()


@pytest.mark.parametrize("tokens, n, k", [(256, 256, 512), (400, 144, 512), (1040, 528, 1024)])
def test_one_group_has_the_bits_of_cublaslt(tokens, n, k):
    # So linears of one matrix may use either.
    torch.manual_seed(tokens)
    (codes, scales), (matrices, grid) = rows_with_nans(tokens, k, tokens), stack_of(1, n, k)
    expected = torch._scaled_mm(
        codes, matrices[0].t(), scales.t(), grid[0].t(), out_dtype=torch.bfloat16
    )
    rows = forward((codes, scales), (matrices, grid), offs_of([tokens]))
    contracted = ops._grouped_gemm(codes, scales, matrices[0], grid[0], offs_of([k]), tokens=k)
    assert same_bits(rows, expected) and same_bits(contracted[0], expected)


# ------------------------------------------------------------------------------ order, errors


def test_a_replayed_graph_reads_new_ends_beside_other_kernels():
    torch.manual_seed(3)
    x, weight = rows_with_nans(1000, 512, 1000), stack_of(4, 384, 512)
    offs = offs_of([100, 250, 600, 1000])
    forward(x, weight, offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward(x, weight, offs)
    busy, other = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for ends in ([100, 250, 600, 1000], [0, 0, 1000, 1000], [999, 999, 999, 999]):
        offs.copy_(offs_of(ends))
        expected = forward(x, weight, offs).view(torch.int16)
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(350):
            with torch.cuda.stream(busy):
                other @ other
            graph.replay()
            differing += (result.view(torch.int16) != expected).sum()
        assert differing.item() == 0


def test_ends_stay_on_the_device():
    x, weight, offs = rows_with_nans(64, 128, 64), stack_of(2, 128, 128), offs_of([10, 64])
    forward(x, weight, offs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(x, weight, offs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_does_not_fit_is_named():
    (codes, scales), (matrices, grid) = rows_with_nans(64, 128, 64), stack_of(2, 128, 128)
    offs = offs_of([10, 64])
    odd = {
        "needs E4M3 codes": (codes.float(), scales, matrices, grid, offs),
        r"offs must be int32 \(2,\)": (codes, scales, matrices, grid, offs.long()),
        "do not fit codes": (codes, scales[:, :63], matrices, grid, offs),
        "compute capability 9.0": [t.cpu() for t in (codes, scales, matrices, grid, offs)],
    }
    for text, arguments in odd.items():
        with pytest.raises(RuntimeError, match=rf"qshard::_grouped_gemm: .*{text}"):
            ops._grouped_gemm(*arguments)
