"""fuse_ on models of torchtitan 0.2, whose attentions turn queries and keys by a function of their file."""

import copy
import importlib
import inspect

import pytest
import torch
from nn_helpers import assert_bits
from titan_stand_ins import cpu_as_accelerator

import qshard
from qshard.fuse.families import files_of
from qshard.modules.packages import TORCHTITAN
from qshard.nn import rotary

BUDGET_S = 60
MODELS = {"llama3": {"n_kv_heads": 2}, "llama4": {}, "qwen3": {"n_kv_heads": 2}}
LENGTH = 12
POSITIONS = {
    "none": None,
    "of all": torch.arange(3, 3 + LENGTH)[None],
    "of each": torch.stack([torch.arange(LENGTH), torch.arange(LENGTH).flip(0)]),
}


@pytest.fixture(autouse=True)
def on_cpu():
    with cpu_as_accelerator():
        import qshard.integrations.torchtitan  # noqa: F401


def file_of(model):
    return importlib.import_module(f"torchtitan.models.{model}.model.model")


def attention_of(model, **options):
    """An attention of a model, and the table of angles that its layers are given."""
    package = importlib.import_module(f"torchtitan.models.{model}")
    arguments = copy.deepcopy(getattr(package, f"{model}_args")["debugmodel"])
    for name, value in ({"max_seq_len": 64, "dim": 64, "n_heads": 4} | MODELS[model] | options).items():
        setattr(arguments, name, value)
    torch.manual_seed(0)
    attention = file_of(model).Attention(arguments)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    channels = attention.head_dim
    angles = torch.outer(torch.arange(64), 100.0 ** -torch.arange(0, 1, 2 / channels)).float()
    if model == "qwen3":
        angles = angles.repeat(1, 2)
        return attention, torch.cat([angles.cos(), angles.sin()], -1)
    return attention, torch.polar(torch.ones_like(angles), angles)


def fused(module):
    module = copy.deepcopy(module)
    patterns = [row.pattern for row in qshard.fuse_(module)]  # Qwen3's norms of heads, too
    assert patterns[0] == "rotary embedding of queries and keys"
    return module


def outcome(attention, *arguments, **kwargs):
    attention.zero_grad()
    y = attention(*arguments, **kwargs)
    y.float().square().mean().backward()
    return y.detach(), *(p.grad.clone() for p in attention.parameters())


def assert_near(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        bound = 1e-5 if got.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, want, rtol=bound, atol=bound * want.abs().max().item())


@pytest.fixture
def turned(monkeypatch):
    """What was turned by one pass."""
    found, rotate = [], rotary.rotate
    monkeypatch.setattr(rotary, "rotate", lambda *args: found.append(1) or rotate(*args))
    return found


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
def test_attentions_compute_the_same(model, dtype, positions, turned):
    plain, table = attention_of(model)
    plain, x = plain.to(dtype), torch.randn(2, LENGTH, 64).to(dtype)
    arguments = (x, table, None, POSITIONS[positions])
    found = outcome(fused(plain), *arguments)
    assert_near(found, outcome(plain, *arguments))
    assert len(turned) == 2


@pytest.mark.parametrize("model", MODELS)
def test_compiled(model):
    plain, table = attention_of(model)
    module, x = fused(plain), torch.randn(2, LENGTH, 64)
    compiled = torch.compile(module, fullgraph=True, backend="inductor")
    assert_near(outcome(compiled, x, table, None, None), outcome(plain, x, table, None, None))


def test_layers_without_positions(turned):
    plain, table = attention_of("llama4", every_n_layers_nope=2)
    plain.use_rope = False
    x = torch.randn(2, LENGTH, 64)
    assert_bits(outcome(fused(plain), x, table, None), outcome(plain, x, table, None))
    assert not turned


@pytest.mark.parametrize("model", MODELS)
def test_what_the_plain_forward_refuses_is_refused(model):
    plain, table = attention_of(model)
    x = torch.randn(2, LENGTH, 64)
    for arguments in ((x, table), (x, table, object()), (x, table, None, None, 1), (x, table[:2], None)):
        for one in (plain, fused(plain)):
            with pytest.raises((TypeError, AssertionError)):
                one(*arguments)


def test_functions_that_were_replaced(monkeypatch, turned):
    plain, table = attention_of("llama3")
    module, x, file = fused(plain), torch.randn(2, LENGTH, 64), file_of("llama3")
    monkeypatch.setattr(file, "apply_rotary_emb", lambda q, k, **kwargs: (q * 2, k))
    assert_bits(outcome(module, x, table, None), outcome(plain, x, table, None))
    assert not turned
    with pytest.warns(UserWarning, match="apply_rotary_emb of its file is not the one that the file defines"):
        assert not qshard.fuse_(copy.deepcopy(plain))


MLPS = [(file, name) for file, parts in files_of(TORCHTITAN).items() for name in parts if name == "FeedForward"]


@pytest.mark.parametrize("file, name", MLPS)
def test_gated_mlps_give_the_same_bits(file, name):
    cls = getattr(importlib.import_module(file), name)
    more = (8, None) if "multiple_of" in inspect.signature(cls).parameters else ()
    plain, x = cls(32, 96, *more), torch.randn(5, 32)
    module = copy.deepcopy(plain)
    (row,) = qshard.fuse_(module)
    assert (row.module, row.pattern) == (name, "w2(swiglu of w1, w3)")
    for one in (plain, module):
        one(x).square().sum().backward()
    assert_bits([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])
    assert type(copy.deepcopy(module)) is type(module) and isinstance(module, cls)
