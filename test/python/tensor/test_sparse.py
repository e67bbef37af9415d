"""Sparse tensors beside quantized ones: products read codes, everything else the value."""

import pytest
import torch
from helpers import assert_same, value

ops = torch.ops.qshard
LAYOUTS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}
PRODUCTS = {
    "sparse.mm": lambda sparse, q: torch.sparse.mm(sparse, q),
    "@": lambda sparse, q: sparse @ q,
    "mv": lambda sparse, q: sparse @ q[:, 0],
    "addmm": lambda sparse, q: torch.sparse.addmm(torch.ones(20, 32), sparse, q),
    "mm from the left": lambda sparse, q: torch.mm(q.t(), sparse.t().to_sparse_coo()),
}
OTHERS = {
    "add": lambda mask, q: q + mask,
    "add_": lambda mask, q: q.clone().add_(mask),
    "mul": lambda mask, q: (mask * q).to_dense(),
    "sparse_mask": lambda mask, q: q.sparse_mask(mask).to_dense(),
}


def operands(layout, keep_master):
    torch.manual_seed(0)
    dense = torch.randn(20, 48).relu()
    q = ops.quantize(torch.randn(48, 32), "float8_blockwise", keep_master=keep_master)
    mask = (torch.randn(48, 32) > 0).float()
    return LAYOUTS[layout](dense), LAYOUTS[layout](mask), q


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:aten::add_")
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_beside_quantized_ones(layout, keep_master):
    sparse, mask, q = operands(layout, keep_master)
    for name, product in PRODUCTS.items():
        assert_same(product(sparse, q), product(sparse, ops.dequantize(q)), name)
    for name, function in OTHERS.items():
        assert_same(function(mask, q), function(mask, value(q)), name)
    leaf = torch.nn.Parameter(q)
    torch.sparse.mm(sparse, leaf).sum().backward()
    assert torch.allclose(leaf.grad, sparse.to_dense().t() @ torch.ones(20, 32))
