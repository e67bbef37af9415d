"""fuse_ on modules of torchtitan 0.3: rotary embeddings, norms and gated MLPs that its models share."""

import copy
import importlib

import pytest
import torch
from nn_helpers import assert_bits
from titan_jobs import on_cpu

import qshard
from qshard.nn import rotary

BUDGET_S = 60
LENGTH, CHANNELS = 12, 16
POSITIONS = {
    "none": None,
    "of all": torch.arange(3, 3 + LENGTH)[None],
    "of each": torch.stack([torch.arange(LENGTH), torch.arange(LENGTH).flip(0)]),
}


def built(file, name, **options):
    with on_cpu():
        module = importlib.import_module(f"torchtitan.models.common.{file}")
    return getattr(module, name).Config(**options).build()


def fused(module):
    module = copy.deepcopy(module)
    (row,) = qshard.fuse_(module)
    return module, row.pattern


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ComplexRoPE", "CosSinRoPE"])
def test_rotary_modules_turn_the_same_in_one_pass_each(name, dtype, positions, monkeypatch):
    turned, rotate = [], rotary.rotate
    monkeypatch.setattr(rotary, "rotate", lambda *args: turned.append(1) or rotate(*args))
    plain = built("rope", name, dim=CHANNELS, max_seq_len=32)
    module, pattern = fused(plain)
    assert pattern == "rotary embedding of queries and keys"
    torch.manual_seed(0)
    query_and_key = [torch.randn(2, LENGTH, heads, CHANNELS).to(dtype) for heads in (4, 2)]
    found, expected = (one(*query_and_key, POSITIONS[positions]) for one in (module, plain))
    assert len(turned) == 2
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        if name == "CosSinRoPE":  # in fp32 and rounded once, too
            assert torch.equal(got, want)
        bound = 1e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def test_norms_and_gated_mlps():
    norm = built("nn_modules", "RMSNorm", normalized_shape=32)
    module, pattern = fused(norm)
    x = torch.randn(5, 32)
    assert pattern == "RMSNorm, eps=1e-05"
    torch.testing.assert_close(module(x), norm(x))
    with on_cpu():
        from torchtitan.models.common.feed_forward import FeedForward
        from torchtitan.models.common.linear import Linear
    sizes = {"w1": (32, 96), "w2": (96, 32), "w3": (32, 96)}
    linears = {n: Linear.Config(in_features=i, out_features=o, bias=False) for n, (i, o) in sizes.items()}
    mlp = FeedForward.Config(**linears).build()
    module, pattern = fused(mlp)
    assert pattern == "w2(swiglu of w1, w3)"
    for one in (mlp, module):
        one(x).square().sum().backward()
    assert_bits([p.grad for p in module.parameters()], [p.grad for p in mlp.parameters()])
