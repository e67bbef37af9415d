"""Modules that look like those that fuse_ knows, and compute something else or are not registered:
it leaves each as it is."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import assert_bits
from test_fuse import MLP, TwiceRounded
from torch import nn

import qshard

SIZE = 8


def tensor(*shape, scale=1.0, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return (x * scale).to(dtype)


# Rows of two dimensions, which many kinds of norms treat alike, and others; values near zero and
# far from it.
ROWS = [(tensor(5, SIZE),), (tensor(5, SIZE, scale=300),)]
IMAGES = [*ROWS, (tensor(2, SIZE, 4, SIZE),), (tensor(2, 6, SIZE, scale=300),)]
HALF = [(tensor(5, SIZE, dtype=torch.float16),), (tensor(5, SIZE, dtype=torch.bfloat16),)]

ALIKE = {}  # by name: what makes one, the arguments of its calls


def alike(calls=ROWS):
    def add(make):
        ALIKE[make.__name__] = make, calls
        return make

    return add


# ------------------------------------------------------------------------------------------ norms


def normed(x, dim, eps=1e-6):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + eps)


class Weighted(nn.Module):
    def __init__(self, size=SIZE, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, size)), eps


@alike(IMAGES[:3])
class OverChannels(Weighted):
    def forward(self, x):
        shape = (-1, *[1] * (x.dim() - 2))
        return (normed(x, 1, self.eps) * self.weight.view(shape)).to(x.dtype)


@alike(IMAGES)
class OverAllButTheFirst(Weighted):
    def forward(self, x):
        return (normed(x, list(range(1, x.dim())), self.eps) * self.weight).to(x.dtype)


@alike([*ROWS, (tensor(5, SIZE), tensor(5, SIZE, scale=3))])
class GatedNorm(Weighted):
    """As Mamba's."""

    def forward(self, x, gate=None):
        x = x if gate is None else x * F.silu(gate)
        return (normed(x, -1, self.eps) * self.weight).to(x.dtype)


@alike()
class ClippedNorm(Weighted):
    def forward(self, x):
        return (normed(x.clamp(-50, 50), -1, self.eps) * self.weight).to(x.dtype)


@alike(IMAGES)
class NormOfRows(Weighted):
    def forward(self, x):
        y = normed(x, -1, self.eps) * self.weight
        return y.to(x.dtype) if x.dim() == 2 else y.to(x.dtype) / x.shape[1]


@alike([*ROWS, *HALF])
class WideForHalf(Weighted):
    def forward(self, x):
        y = normed(x, -1, self.eps) * self.weight
        return y if x.dtype == torch.float16 else y.to(x.dtype)


@alike()
class NormWithABound(Weighted):
    def forward(self, x):
        return (normed(x, -1, self.eps) * self.weight).clamp(-2, 2)


@alike()
class NormWithASwitch(Weighted):
    on = True

    def forward(self, x):
        return (normed(x, -1, self.eps) * self.weight).to(x.dtype) if self.on else x


@alike()
class CountedNorm(Weighted):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return normed(x, -1, self.eps) * self.weight * (1 if self.calls < 9 else 0)


@alike()
class NoisyNorm(Weighted):
    def forward(self, x):
        y = normed(x, -1, self.eps) * self.weight
        return y + torch.ones_like(y) if y.requires_grad else y


@alike()
class SubclassOfAKnownNorm(TwiceRounded):
    def __init__(self):
        super().__init__(SIZE)


@alike()
class SubclassWithMore(TwiceRounded):
    def __init__(self):
        super().__init__(SIZE)

    def forward(self, hidden_states):
        return super().forward(hidden_states) if hidden_states.abs().max() < 10 else hidden_states


@alike([*ROWS, (tensor(5, SIZE), 2.0)])
class TorchNormWithAScale(nn.RMSNorm):
    def __init__(self):
        super().__init__(SIZE, eps=1e-6)

    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


@alike()
class CentredTwice(nn.LayerNorm):
    def __init__(self):
        super().__init__(SIZE)

    def forward(self, input):
        return super().forward(input) - self.bias


def bounded(forward):
    @functools.wraps(forward)
    def inner(self, hidden_states):
        return forward(self, hidden_states).clamp(max=1.5)

    return inner


@alike()
class Decorated(TwiceRounded):
    def __init__(self):
        super().__init__(SIZE)

    forward = bounded(TwiceRounded.forward)


@alike()
def norm_of_the_same_name():
    """A class of the name and the module of a known one."""
    members = {"forward": lambda self, x: F.normalize(x, dim=-1) * self.weight}
    cls = type("TwiceRounded", (Weighted,), {**members, "__module__": TwiceRounded.__module__})
    return cls()


@alike([(tensor(5, 2, SIZE),)])
def norm_over_two_dimensions():
    return nn.RMSNorm((2, SIZE), eps=1e-6)


@alike()
def norm_without_a_weight():
    return nn.LayerNorm(SIZE, elementwise_affine=False)


@alike()
def norm_with_no_eps():
    return nn.RMSNorm(SIZE)


# ------------------------------------------------------------------------------------------- MLPs


class Clipped(nn.Module):
    """As SiLU where others look."""

    def forward(self, x):
        return F.silu(x).clamp(max=10)


class CutBelow(nn.Module):
    def forward(self, x):
        return torch.where(x < -8, torch.zeros_like(x), F.silu(x))


class BoundedReLU(nn.Module):
    def forward(self, x):
        return F.relu(x).clamp(max=9)


class LimitedSiLU(nn.Module):
    limit = 100.0

    def forward(self, x):
        return F.silu(x).clamp(max=self.limit)


class LoudSiLU(nn.SiLU):
    def forward(self, x):
        return super().forward(x) * (1 + (x.abs() > 20).float())


def mlp_with(act):
    torch.manual_seed(0)
    return MLP(SIZE, SIZE, act=act)


for kind in (Clipped, CutBelow, BoundedReLU, LimitedSiLU, LoudSiLU):
    ALIKE[f"MLPWith{kind.__name__}"] = (lambda kind=kind: mlp_with(kind())), ROWS


@alike()
def mlp_with_exact_gelu():
    return mlp_with(nn.GELU())


@alike()
def mlp_with_an_activation_of_its_own():
    act = nn.SiLU()
    act.forward = lambda x: F.silu(x).clamp(max=8)
    return mlp_with(act)


@alike()
def mlp_with_a_function_of_its_own():
    module = mlp_with(None)
    del module.act_fn
    module.act_fn = functools.partial(F.gelu, approximate="none")
    return module


@alike([*ROWS, (tensor(5, SIZE), torch.tensor([1.0, 0, 1, 0, 1])[:, None])])
class MaskedMLP(MLP):
    def __init__(self):
        super().__init__(SIZE, SIZE)

    def forward(self, x, mask=None):
        y = super().forward(x)
        return y if mask is None else y * mask


@alike()
class MLPOfLargeInputs(MLP):
    def __init__(self):
        super().__init__(SIZE, SIZE)

    def forward(self, x):
        return super().forward(x.clamp(-30, 30))


@alike()
class MLPWithoutABase(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


# ---------------------------------------------------------------------------- rotary embeddings


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def angles(length, channels=SIZE):
    a = torch.outer(torch.arange(float(length)), 0.5 ** torch.arange(channels // 2.0)).repeat(1, 2)
    return a.cos(), a.sin()


SHORT = (tensor(2, 3, 5, SIZE), *angles(5))
TURNS = [SHORT, (tensor(2, 3, 40, SIZE), *angles(40)), (SHORT[0].bfloat16(), *angles(5))]


@alike(TURNS)
class PromotedRotary(nn.Module):
    """It gives fp32 for bfloat16 and tables in fp32."""

    def forward(self, x, cos, sin):
        return turned(x, cos, sin)


@alike(TURNS)
class RotaryOfShortSequences(nn.Module):
    def forward(self, x, cos, sin):
        return turned(x, cos, sin) if x.shape[2] < 30 else x


@alike(TURNS)
class RotaryOfPositiveAngles(nn.Module):
    def forward(self, x, cos, sin):
        return turned(x, cos, sin.abs() if x.shape[1] > 2 else sin)


def rotary(q, k, cos, sin):
    scale = 1.0 if q.abs().max() < 3 else 0.5
    return turned(q, cos, sin) * scale, turned(k, cos, sin)


@alike([(tensor(2, 3, 5, SIZE), *(t[None] for t in angles(5)))])
class CallsAFunction(nn.Module):
    def forward(self, x, cos, sin):
        return torch.stack(rotary(x * 3, x, cos, sin))


# ------------------------------------------------------------------------------------------------


def values(module, calls):
    kept = []
    for args in calls:
        module.zero_grad()
        y = module(*args)
        if y.requires_grad:
            y.float().square().sum().backward()
        grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        kept.append((y.detach(), *grads))
    return kept


@pytest.mark.parametrize("name", ALIKE)
def test_what_looks_alike_is_left(name, recwarn):
    make, calls = ALIKE[name]
    module = make()
    assert isinstance(module, nn.Module)
    plain, kind = copy.deepcopy(module), type(module)
    report = qshard.fuse_(nn.Sequential(module))
    assert not report and type(module) is kind
    for got, expected in zip(values(module, calls), values(plain, calls), strict=True):
        assert_bits(got, expected)


def test_there_are_many():
    assert len(ALIKE) >= 30, len(ALIKE)


def test_the_report_says_why():
    known_subclass, activation = SubclassOfAKnownNorm(), mlp_with(Clipped())
    parts = {"norm": known_subclass, "mlp": activation, "more": mlp_with(Clipped())}
    report = qshard.fuse_(nn.ModuleDict(parts))
    assert [(row.name, row.module) for row in report.left] == [
        ("norm", "SubclassOfAKnownNorm"), ("mlp", "MLP"), ("more", "MLP"),
    ]
    assert "a subclass of TwiceRounded" in report.left[0].reason
    assert "its activation, Clipped(), is not known" in report.left[1].reason
    assert "nothing recognised" in str(report) and "mlp and 1 more" in str(report)


def test_other_arguments_run_the_plain_forward():
    """A class whose modules take more may be registered: what more they are given they see."""

    class Scaled(Weighted):
        def forward(self, x, gate=None):
            x = x if gate is None else x * F.silu(gate)
            return (normed(x, -1, self.eps) * self.weight).to(x.dtype)

    qshard.fuse.register(Scaled, qshard.fuse.Norm(keeps_dtype=True))
    plain = Scaled()
    module = copy.deepcopy(plain)
    assert len(qshard.fuse_(module)) == 1
    x, gate = tensor(5, SIZE), tensor(5, SIZE, scale=2)
    torch.testing.assert_close(module(x), plain(x))
    for args, kwargs in (((x, gate), {}), ((x,), {"gate": gate}), ((), {"gate": gate, "x": x})):
        assert_bits(module(*args, **kwargs), plain(*args, **kwargs))
    for args, kwargs in (((), {}), ((x,), {"other": 1}), ((x, gate, 1), {})):
        with pytest.raises(TypeError, match="forward"):
            module(*args, **kwargs)
    one = torch.randn(5, 1)  # which the formula broadcasts
    assert_bits(module(one), plain(one))
    whole = torch.arange(SIZE)
    assert_bits(module(whole), plain(whole))
