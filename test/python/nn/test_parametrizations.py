"""torch.nn.utils.parametrize on quantized weights: it gives a parameter other values by set_."""

import pytest
import torch
from helpers import FORMATS, assert_same, fit, is_quantized, ops, rounded, value, weight
from torch import nn
from torch.nn.utils import parametrizations, parametrize


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device(request.param)


def linear(fmt, device, keep_master):
    module = nn.Linear(64, fit(fmt, 64), bias=False, device=device)
    values = weight(fit(fmt, 64), 64).to(device)
    module.weight = nn.Parameter(ops.quantize(values, fmt, keep_master=keep_master))
    return module


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2

    def right_inverse(self, x):
        return x / 2


def assert_has_value(q, values, keep_master):
    """The values where they are kept, else what quantizing left of them."""
    ops.flush([q.detach()])
    fmt = ops.format(q.detach())
    if fmt == "float8_delayed" and not keep_master:  # scaled by its history
        return torch.testing.assert_close(value(q), values, rtol=0.2, atol=1e-2)
    assert_same(q, values if keep_master else rounded(values.cpu(), fmt).to(values.device))


@pytest.mark.parametrize("keep_master", [False, True], ids=["no-master", "master"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_parametrization_comes_and_goes(fmt, keep_master, device):
    module = linear(fmt, device, keep_master)
    q, before = module.weight, value(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    parametrize.register_parametrization(module, "weight", Doubled())
    assert module.parametrizations.weight.original is q and is_quantized(q)
    assert_has_value(q, before / 2, keep_master)
    values = module.weight.detach()
    assert_same(values, value(q) * 2)
    parametrize.remove_parametrizations(module, "weight")
    assert module.weight is q and is_quantized(q) and optimizer.param_groups[0]["params"][0] is q
    assert_has_value(q, values, keep_master)


def test_an_orthogonal_weight_stays_quantized(device):
    module = linear("float8_blockwise", device, keep_master=True)
    parametrizations.orthogonal(module)
    values = module.weight.detach()
    identity = torch.eye(64, device=device)
    torch.testing.assert_close(values @ values.mT, identity, rtol=1e-3, atol=1e-3)
    parametrize.remove_parametrizations(module, "weight")
    assert is_quantized(module.weight)
    assert_same(module.weight, values)


def test_set_copies_values(device):
    """The memory is not shared: the plain tensor goes its own way."""
    q = linear("mxfp8", device, keep_master=True).weight.detach()
    version, values = q._version, weight(64, 64, seed=1).to(device)
    assert q.set_(values.mT) is q and q._version > version
    expected = values.mT.clone()
    values.zero_()
    assert_same(q, expected)
    assert torch.equal(ops.dequantize(q), rounded(expected.cpu(), "mxfp8").to(device))


def test_memory_on_another_device_is_refused_by_name():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    q = linear("mxfp8", torch.device("cuda"), keep_master=True).weight.detach()
    before, elsewhere = value(q), torch.zeros(64, 64)
    with pytest.raises(RuntimeError, match=r"put a plain Float\[64, 64\] on cpu tensor in the place"):
        q.data = elsewhere
    with pytest.raises(RuntimeError, match="on cpu"):
        q.set_(elsewhere)
    assert_same(q, before)
