"""Sums of rows, by which gradients of tokens are added up, against the oracle."""

import pytest
import torch
from forked import refusal
from helpers import ops
from reference import sums as reference
from test_kernels_reference import DEVICES, DTYPES, same_bits_or_nan, wide_values

CASES = [(40, 96, 25, 4), (300, 100, 64, 9), (7, 1, 5, 2), (3, 2056, 2, 3), (0, 16, 4, 2), (5, 0, 4, 2), (5, 16, 0, 2),
         (5, 16, 3, 0)]


def places_of(rows, sums, per_sum):
    """Rows more than once, and what names no row."""
    places = torch.randint(-2, rows + 3, (sums, per_sum), generator=torch.Generator().manual_seed(rows))
    places[sums // 2 :, :1] = torch.iinfo(torch.int64).min
    places[: sums // 2, -1:] = torch.iinfo(torch.int64).max
    return places


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, columns, sums, per_sum", CASES, ids=str)
def test_every_bit_is_the_oracles(rows, columns, sums, per_sum, dtype, device):
    places = places_of(rows, sums, per_sum)
    special = torch.randn(rows, columns).to(dtype)
    for value in (torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4, -0.0):
        special[torch.rand(rows, columns) < 0.02] = value
    for x in (wide_values((1, rows, columns), dtype)[0], special):
        expected = reference.sum_rows(x, places)
        got = ops._sum_rows(x.to(device), places.to(device))
        assert got.dtype == dtype and got.is_contiguous() and same_bits_or_nan(got.cpu(), expected)
        # Rows that are not contiguous, and rows that begin at no multiple of 16 bytes.
        turned, odd = x.to(device).T.contiguous().T, torch.empty(rows * columns + 1, dtype=dtype, device=device)[1:]
        odd = odd.view(rows, columns).copy_(x)
        for other in (turned, odd):
            assert same_bits_or_nan(ops._sum_rows(other, places.to(device).T.contiguous().T).cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device):
    x, places = torch.randn(4, 32, device=device), torch.zeros(3, 2, dtype=torch.int64, device=device)
    wrong = [
        (x[0], places), (x.double(), places), (x, places[0]), (x, places.int()),
        (ops.quantize(x, "float8_blockwise"), places),
    ]
    for arguments in wrong:
        if device == "cpu":
            assert "needs rows (R, N)" in refusal(lambda: ops._sum_rows(*arguments))
        else:
            with pytest.raises(RuntimeError, match="needs rows"):
                ops._sum_rows(*arguments)
