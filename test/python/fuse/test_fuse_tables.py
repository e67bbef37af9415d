"""Queries and keys that are turned by tables of a model: apply_rotary_emb, and modules that `RotaryPair`
describes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import qshard
from qshard.nn import rotary

BUDGET_S = 40
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
CHANNELS, LENGTH = 8, 6
POSITIONS = {
    "none": None,
    "of all": torch.arange(2, 2 + LENGTH)[None],
    "of each": torch.stack([torch.arange(LENGTH), torch.arange(LENGTH).flip(0) + 3]),
}
any_positions = pytest.mark.parametrize("positions", POSITIONS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def rows_of(table, positions, length):
    """(1 or batch, positions, 1, width)."""
    return table[None, :length, None] if positions is None else table[positions][:, :, None]


class Complex(nn.Module):
    """As Meta's Llama and torchtitan's write it."""

    def __init__(self, length=LENGTH + 3):
        super().__init__()
        angles = torch.outer(torch.arange(length), 10.0 ** -torch.arange(CHANNELS // 2)).float()
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

    def forward(self, query, key, positions=None):
        freqs = rows_of(self.table, positions, query.shape[1])
        pairs = (x.float().reshape(*x.shape[:-1], -1, 2) for x in (query, key))
        turned = (torch.view_as_real(torch.view_as_complex(x) * freqs).flatten(3) for x in pairs)
        return tuple(x.type_as(query) for x in turned)


class CosSin(nn.Module):
    """As torchtitan's models of Qwen3 and gpt-oss."""

    def __init__(self, length=LENGTH + 3):
        super().__init__()
        angles = torch.outer(torch.arange(length), 10.0 ** -torch.arange(CHANNELS // 2)).float()
        angles = angles.repeat(1, 2)
        self.register_buffer("table", torch.cat([angles.cos(), angles.sin()], -1))

    def forward(self, query, key, positions=None):
        cos, sin = rows_of(self.table, positions, query.shape[1]).chunk(2, -1)

        def turned(x):
            first, second = x.float().chunk(2, -1)
            return (x.float() * cos + torch.cat([-second, first], -1) * sin).type_as(x)

        return turned(query), turned(key)


KINDS = (Complex, CosSin)
for kind in KINDS:
    qshard.fuse.register(kind, qshard.fuse.RotaryPair("table"))


def heads(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, LENGTH, n, CHANNELS).to(device, dtype) for n in (3, 1)]


def outcome(turn, *tensors, **kwargs):
    """What it gives, and gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    turned = turn(*leaves, **kwargs)
    grads = torch.autograd.grad(turned, leaves, [t.flip(0) for t in tensors])
    return [t.detach() for t in (*turned, *grads)]


def assert_near(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        # The modules' gradients are sums of two that are rounded to bf16.
        bound = 1e-6 if want.dtype == torch.float32 else 2**-6
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def fused(module):
    module = copy.deepcopy(module)
    (row,) = qshard.fuse_(module)
    assert row.pattern == "rotary embedding of queries and keys"
    return module


@any_positions
@dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_modules_compute_the_same_in_one_pass_each(device, kind, dtype, positions, monkeypatch):
    turned, rotate = [], rotary.rotate
    monkeypatch.setattr(rotary, "rotate", lambda *args: turned.append(1) or rotate(*args))
    plain = kind().to(device)
    given = POSITIONS[positions]
    given = {} if given is None else {"positions": given.to(device)}
    query_and_key = heads(device, dtype)
    found = outcome(fused(plain), *query_and_key, **given)
    assert_near(found, outcome(plain, *query_and_key, **given))
    if kind is CosSin:  # rounded once as well
        assert all(map(torch.equal, found[:2], plain(*query_and_key, **given)))
    assert len(turned) == 2


@any_positions
@dtypes
@pytest.mark.parametrize("device", DEVICES)
def test_apply_rotary_emb_is_the_function_of_that_name(device, dtype, positions):
    module, given = Complex().to(device), POSITIONS[positions]
    given = None if given is None else given.to(device)
    query_and_key = heads(device, dtype)
    found = outcome(lambda q, k: qshard.nn.apply_rotary_emb(q, k, module.table, given), *query_and_key)
    assert_near(found, outcome(lambda q, k: module(q, k, given), *query_and_key))


def test_what_does_not_fit_is_refused_in_one_line():
    query, key = heads()
    freqs = Complex().table
    wrong = {
        "three dimensions": (query[0], key[0], freqs),
        "fp64": (query.double(), key.double(), freqs),
        "two dtypes": (query, key.bfloat16(), freqs),
        "complex128": (query, key, freqs.to(torch.complex128)),
        "real": (query, key, freqs.real),
        "cosines beside sines": (query, key, CosSin().table),
        "too few positions": (query, key, freqs[: LENGTH - 1]),
        "too few channels": (query, key, freqs[:, 1:]),
        "positions of other sequences": (query, key, freqs, torch.zeros(3, LENGTH, dtype=torch.long)),
        "no tensor": (query, key, None),
    }
    for name, arguments in wrong.items():
        with pytest.raises(ValueError, match="apply_rotary_emb: takes queries and keys .* got .* and") as caught:
            qshard.nn.apply_rotary_emb(*arguments)
            pytest.fail(name)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_forward_takes_and_refuses_the_rest(kind):
    plain = kind()
    module = fused(plain)
    query, key = heads(dtype=torch.float64)
    assert_near(module(query.float(), key.double()), plain(query.float(), key.double()))
    for arguments in ((query,), (query, key, None, 1), (query[:, :, :, :4], key)):
        for one in (plain, module):
            with pytest.raises((RuntimeError, TypeError)):
                one(*arguments)
    module.table = None
    with pytest.raises(TypeError):
        module(*heads())
    without = kind()
    without.table = None
    report = qshard.fuse_(without)
    assert not report and report.left[0].reason == "its table is no tensor"


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_copied_and_pickled(kind):
    plain = kind()
    module, query_and_key = fused(plain), heads()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_near(outcome(compiled, *query_and_key), outcome(plain, *query_and_key))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert all(map(torch.equal, other(*query_and_key), module(*query_and_key)))
