"""Sums of rows, by which gradients of tokens are added up, against the oracle."""

import pytest
import torch
from forked import refusal
from helpers import ops
from reference import sums as reference
from test_kernels_reference import DEVICES, DTYPES, same_bits_or_nan, wide_values

CASES = [(40, 96, 25, 90), (300, 100, 64, 600), (7, 1, 5, 10), (3, 2056, 2, 6), (0, 16, 4, 8), (5, 0, 4, 8),
         (5, 16, 0, 10), (5, 16, 3, 0)]
LEAST, MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def sums_of(rows, sums, count):
    """places and ends: rows more than once and of several sums, sums of nothing, and what names no row or no place."""
    generator = torch.Generator().manual_seed(rows)
    places = torch.randint(-2, rows + 3, (count,), generator=generator)
    places[::7], places[3::7] = LEAST, MOST
    ends = torch.randint(-1, count + 1, (sums,), generator=generator).sort().values
    ends[1:2], ends[-1:] = LEAST, MOST
    return places, ends


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, columns, sums, count", CASES, ids=str)
def test_every_bit_is_the_oracles(rows, columns, sums, count, dtype, device):
    numbers = sums_of(rows, sums, count)
    special = torch.randn(rows, columns).to(dtype)
    for value in (torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4, -0.0):
        special[torch.rand(rows, columns) < 0.02] = value
    for x in (wide_values((1, rows, columns), dtype)[0], special):
        expected = reference.sum_rows(x, *numbers)
        got = ops._sum_rows(x.to(device), *(n.to(device) for n in numbers))
        assert got.dtype == dtype and got.is_contiguous() and same_bits_or_nan(got.cpu(), expected)
        # Rows that are not contiguous, and rows that begin at no multiple of 16 bytes.
        turned, odd = x.to(device).T.contiguous().T, torch.empty(rows * columns + 1, dtype=dtype, device=device)[1:]
        odd = odd.view(rows, columns).copy_(x)
        for other in (turned, odd):
            strided = [n.to(device).repeat_interleave(2)[::2] for n in numbers]
            assert same_bits_or_nan(ops._sum_rows(other, *strided).cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device):
    x, places = torch.randn(4, 32, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    wrong = [
        (x[0], places, places), (x.double(), places, places), (x, places[None], places), (x, places.int(), places),
        (x, places, places.int()), (ops.quantize(x, "float8_blockwise"), places, places),
    ]
    for arguments in wrong:
        if device == "cpu":
            assert "needs rows" in refusal(lambda: ops._sum_rows(*arguments))
        else:
            with pytest.raises(RuntimeError, match="needs rows"):
                ops._sum_rows(*arguments)
