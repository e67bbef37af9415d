"""The random Hadamard transform and plain transposes, against the oracle and by their properties."""

import pytest
import torch
from helpers import ops
from reference import hadamard as reference
from test_kernels_reference import DEVICES, DTYPES, same_bits_or_nan, wide_values

SHAPES = [(1, 1), (16, 16), (31, 5), (64, 48), (100, 33), (129, 260), (0, 7), (7, 0), (1000, 96)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_bit_is_the_oracles(shape, hadamard, dtype, device):
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype), wide_values((1, *shape), dtype)[0]]
    special = torch.randn(shape).to(dtype)
    for x in (float("nan"), -float("inf"), torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4):
        special[torch.rand(shape) < 0.01] = x
    for x in (*values, special, torch.zeros(shape, dtype=dtype)):
        got = ops._transposed_operand(x.to(device), hadamard=hadamard).cpu()
        expected = reference.transposed(x, hadamard)
        assert got.shape == expected.shape and got.dtype == dtype
        assert same_bits_or_nan(got, expected)
        assert not hadamard or not got[got.isnan()].signbit().any()


def test_the_oracle_multiplies_by_an_orthonormal_matrix():
    matrix = reference.matrix().double()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))
    torch.manual_seed(1)
    x = torch.randint(-999, 1000, (50, 16)).float()  # every sum is exact
    assert torch.equal(reference.random_hadamard(x).double(), x.double() @ matrix.t())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [16, 40, 333])
def test_products_over_transformed_rows_stay(m, device):
    torch.manual_seed(2)
    a, b = (torch.randn(m, n).to(device) for n in (24, 56))
    a_t, b_t = (ops._transposed_operand(x, hadamard=True).double() for x in (a, b))
    exact = a.double().t() @ b.double()
    size = a.double().abs().t() @ b.double().abs()
    assert ((a_t @ b_t.t() - exact).abs() <= size * 2.0**-20 + 1e-5).all()


@pytest.mark.parametrize("device", DEVICES)
def test_an_outlier_is_spread_over_its_group(device):
    x = torch.zeros(64, 3, device=device)
    x[20, 1] = 64
    y = ops._transposed_operand(x, hadamard=True)
    assert torch.equal(y[1, 16:32].abs(), torch.full((16,), 16.0, device=device))
    assert y.abs().sum() == 256


def test_non_matrices_are_named():
    for x in (torch.zeros(3), torch.zeros(3, 4, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="_transposed_operand"):
            ops._transposed_operand(x)
