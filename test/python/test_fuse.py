"""fuse_: what is recognised, and that it computes the same."""

import copy
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_worlds
from dist_models import check_gathered, local
from nn_helpers import RECIPES, assert_bits, randomize
from torch import nn
from torch.distributed.fsdp import fully_shard

import qshard


class TwiceRounded(nn.Module):
    """As in Hugging Face's Llama."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class ZeroCentered(nn.Module):
    """As in Hugging Face's Gemma."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class TorchNorm(nn.RMSNorm):
    def __init__(self, size, eps=1e-6):
        super().__init__(size, eps)


class MLP(nn.Module):
    def __init__(self, size=32, inner=64, act=None, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OtherNames(nn.Module):
    """As in Llama's own code: the product the other way round, the activation a function."""

    def __init__(self, size=32, inner=64):
        super().__init__()
        self.w1, self.w2 = nn.Linear(size, inner, bias=False), nn.Linear(inner, size, bias=False)
        self.w3 = nn.Linear(size, inner, bias=False)

    def forward(self, x):
        return self.w2(self.w3(x) * F.silu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, norm=TwiceRounded, mlp=MLP):
        super().__init__()
        self.norm, self.mlp = norm(32), mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def input_of(*shape, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).requires_grad_()


def results(model, x):
    model.zero_grad()
    x.grad = None
    y = model(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("mlp", [MLP, OtherNames])
@pytest.mark.parametrize("norm", [TwiceRounded, ZeroCentered, TorchNorm])
@pytest.mark.parametrize("format", [None, "float8_blockwise"])
def test_recognised(mlp, norm, format):
    model = randomize(nn.Sequential(Block(norm, mlp), Block(norm, mlp)))
    if format:
        qshard.quantize_(model, RECIPES[format])
    names, parameters = list(model.state_dict()), list(model.parameters())
    x = input_of(7, 32)
    expected = results(model, x)
    report = qshard.fuse_(model)
    assert [row.name for row in report] == ["0", "0.norm", "0.mlp", "1", "1.norm", "1.mlp"]
    assert report[0].pattern.startswith("norm into mlp.") and report[0].module == "Block"
    assert report[1].pattern == "RMSNorm, eps=1e-06" and report[1].module == norm.__name__
    assert "swiglu of" in report[2].pattern and "0.mlp" in str(report)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(model[0].mlp, mlp) and isinstance(model[0].norm, norm)
    torch.testing.assert_close(results(model, x), expected, rtol=1e-4, atol=1e-4)
    assert not qshard.fuse_(model)  # it is fused
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(other[0].mlp) is type(model[0].mlp)
        assert_bits(other(x), model(x))


@pytest.mark.parametrize("act,activation", [
    (nn.SiLU(), "swiglu"), (nn.GELU(approximate="tanh"), "geglu"), (nn.ReLU(), "reglu"),
    (nn.Sigmoid(), "glu")])
def test_gated_mlps_give_the_same_bits(act, activation):
    model = MLP(act=act, bias=True)
    x = input_of(7, 32)
    expected = results(model, x)
    (row,) = qshard.fuse_(model)
    assert row.pattern == f"down_proj({activation} of gate_proj, up_proj)"
    assert_bits(results(model, x), expected)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    inner = {t.untyped_storage().data_ptr() for t in kept if t.shape == (7, 64)}
    assert len(inner) == 3  # gate(x), up(x), and their product, the input of down_proj


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", [TwiceRounded, ZeroCentered, nn.RMSNorm])
def test_norms_in_other_dtypes(norm, dtype):
    plain = randomize(norm(96, eps=1e-3).to(dtype))
    fused = copy.deepcopy(plain)
    qshard.fuse_(fused)
    assert isinstance(fused, norm) and type(fused) is not norm
    for x in (input_of(7, 96, dtype=torch.bfloat16), input_of(7, 96)):
        if dtype == torch.bfloat16 and x.dtype == torch.float32 and norm is ZeroCentered:
            continue  # the plain one's result is in the input's dtype, computed from rounded weights
        y, expected = fused(x), plain(x)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-5)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary(q, k, cos, sin, unsqueeze_dim=1):
    """As in Hugging Face's Llama."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def neighbours_rotary(q, k, cos, sin):
    half = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    return q * cos[:, None] + half * sin[:, None], k


class Attention(nn.Module):
    def __init__(self, size=32, heads=4, kv_heads=2):
        super().__init__()
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size // heads * kv_heads)
        self.heads = (-1, size // heads)

    def forward(self, x, cos, sin, *, unsqueeze_dim=None):
        q, k = (p(x).unflatten(-1, self.heads).transpose(1, 2) for p in (self.q_proj, self.k_proj))
        if unsqueeze_dim is None:
            return rotary(q, k, cos, sin)
        return rotary(q, k, cos, sin, unsqueeze_dim)


class OtherAttention(Attention):
    def forward(self, x, cos, sin):
        return neighbours_rotary(x, x, cos, sin)


def tables(batch, length=5, channels=8, dtype=torch.float32):
    shifts = torch.arange(batch, dtype=torch.float32)[:, None]
    positions = torch.arange(length) + shifts
    angles = (positions[..., None] * torch.tensor([1.0, 0.3, 0.1, 0.03])).repeat(1, 1, 2)
    return angles.cos()[..., :channels].to(dtype), angles.sin()[..., :channels].to(dtype)


def test_functions_of_rotary_embeddings(monkeypatch):
    seen, plain = [], Attention()
    model = copy.deepcopy(plain)
    (row,) = qshard.fuse_(model)
    assert row.pattern == "rotary embedding, by rotary" and not qshard.fuse_(model)
    assert not qshard.fuse_(OtherAttention())
    monkeypatch.setattr("qshard.fuse.rotary.rotate", lambda *args: seen.append(args) or qshard.nn.rotary.rotate(*args))

    def run(one, x, *args, **kwargs):
        one.zero_grad()
        q, k = one(x, *args, **kwargs)
        (q.float().square().sum() + k.float().sum()).backward()
        return q.detach(), k.detach(), *(p.grad for p in one.parameters())

    x = input_of(2, 5, 32)
    torch.testing.assert_close(run(model, x, *tables(1)), run(plain, x, *tables(1)), rtol=1e-4, atol=1e-5)
    assert len(seen) == 2
    # Angles of each sequence; the function called otherwise; another dtype: all is as it was.
    for args, kwargs in (
        (tables(2), {}), (tables(1), {"unsqueeze_dim": 1}), (tables(1, dtype=torch.float64), {})
    ):
        got, expected = run(model, x, *args, **kwargs), run(plain, x, *args, **kwargs)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))
    assert len(seen) == 2
    model, plain, x = model.bfloat16(), plain.bfloat16(), x.bfloat16()
    torch.testing.assert_close(
        run(model, x, *tables(1, dtype=torch.bfloat16))[:2],
        run(plain, x, *tables(1, dtype=torch.bfloat16))[:2], rtol=2**-6, atol=2**-6,
    )
    assert len(seen) == 4
    other = copy.deepcopy(model)
    assert type(other) is type(model) and isinstance(other, Attention)
    other(x, *tables(1, dtype=torch.bfloat16))
    assert len(seen) == 6


def test_functions_of_rotary_embeddings_compiled():
    plain = Attention()
    model = copy.deepcopy(plain)
    qshard.fuse_(model)
    model.compile(fullgraph=True, backend="aot_eager")
    x = input_of(2, 5, 32)
    torch.testing.assert_close(model(x, *tables(1)), plain(x, *tables(1)))


def test_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    assert len(qshard.fuse_(model)) == 6
    assert model(torch.randn(7, 32, device="meta")).shape == (7, 32)


class NotThat(nn.Module):
    """Modules with the parts of a pattern that compute something else."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        self.eps = 1e-6
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def mlp_parts():
    return {"gate": nn.Linear(32, 32), "up": nn.Linear(32, 32), "down": nn.Linear(32, 32)}


@pytest.mark.parametrize("make", [
    lambda: nn.LayerNorm(32),
    lambda: nn.RMSNorm(32),
    lambda: nn.RMSNorm(32, eps=1e-5, elementwise_affine=False),
    lambda: nn.RMSNorm((2, 16), eps=1e-5),
    lambda: nn.PReLU(),
    lambda: NotThat(lambda m, x: x * m.weight, weight=nn.Parameter(torch.ones(32))),
    lambda: NotThat(lambda m, x: F.normalize(x, dim=-1) * m.weight, weight=nn.Parameter(torch.ones(32))),
    lambda: NotThat(lambda m, x: F.layer_norm(x, (32,), m.weight, None, m.eps),
                    weight=nn.Parameter(torch.ones(32))),
    lambda: NotThat(lambda m, x: F.rms_norm(x, (32,), m.weight, m.eps) * m.scale,
                    weight=nn.Parameter(torch.ones(32)), scale=nn.Buffer(torch.ones(32))),
    lambda: NotThat(lambda m, x: m.down(F.silu(m.gate(x)) + m.up(x)), **mlp_parts()),
    lambda: NotThat(lambda m, x: m.down(F.silu(m.gate(x)) * m.gate(x)), **mlp_parts()),
    lambda: NotThat(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)) + x, **mlp_parts()),
    lambda: NotThat(lambda m, x: m.down(F.elu(m.gate(x)) * m.up(x)), **mlp_parts()),
    lambda: NotThat(lambda m, x: m.down(F.silu(m.gate(x) * 2) * m.up(x)), **mlp_parts()),
    lambda: NotThat(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)) if x.sum() > 0 else x, **mlp_parts()),
    lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)),
])
def test_left_alone(make):
    module = make()
    kind = type(module)
    report = qshard.fuse_(nn.Sequential(module))
    assert not report and str(report) == "nothing recognised" and type(module) is kind


def test_replaced_forwards_and_hooks():
    module = MLP()
    module.forward = lambda x: x
    assert not qshard.fuse_(module)
    module, seen = MLP(), []
    for part in (module, module.gate_proj):
        part.register_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    assert len(qshard.fuse_(module)) == 1 and not seen
    module(input_of(2, 32))
    assert seen == ["Linear", "FusedMLP"]


def forbidden(*_):
    raise AssertionError("a hook of the user's was called")


def of_activation(kind):
    """Registers a hook on a module."""
    return {
        "forward": lambda m, hook: m.register_forward_hook(hook),
        "forward pre": lambda m, hook: m.register_forward_pre_hook(hook),
        "backward": lambda m, hook: m.register_full_backward_hook(hook),
        "own forward": lambda m, hook: setattr(
            m, "forward", lambda x: hook() or type(m).forward(m, x)),
    }[kind]


@pytest.mark.parametrize("kind", ["forward", "forward pre", "backward", "own forward"])
def test_hooks_of_activations(kind):
    register = of_activation(kind)
    model = nn.Sequential(Block(), Block())
    register(model[0].mlp.act_fn, forbidden)
    with pytest.warns(UserWarning, match="0.mlp, a MLP, is left as it is: its act_fn has hooks"):
        report = qshard.fuse_(model)
    assert [row.name for row in report] == ["0.norm", "1", "1.norm", "1.mlp"] and type(model[0].mlp) is MLP
    # Those of later run, too, and as long as they are there.
    seen, x = [], input_of(2, 32)
    expected = results(model[1], x)
    handle = register(model[1].mlp.act_fn, lambda *_: seen.append(1))
    torch.testing.assert_close(results(model[1], x), expected)
    assert seen == [1]
    if handle is not None:
        handle.remove()
        assert_bits(results(model[1], x), expected)
        assert seen == [1]


class Trains(nn.Module):
    """A module whose forward has code for training alone."""

    def forward(self, *args):
        y = super().forward(*args)
        return F.dropout(y, 0.5) if self.training else y


class TrainedNorm(Trains, TwiceRounded):
    pass


class TrainedMLP(Trains, MLP):
    pass


class TrainedSiLU(Trains, nn.SiLU):
    pass


class ScaledOnce(MLP):
    def forward(self, x):
        return super().forward(x) if self.training else super().forward(x) * 2


@pytest.mark.parametrize("make", [
    lambda: TrainedNorm(32), TrainedMLP, ScaledOnce, lambda: MLP(act=TrainedSiLU())])
@pytest.mark.parametrize("training", [True, False])
def test_code_for_one_mode(make, training):
    module = make().train(training)
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    assert not qshard.fuse_(module)
    assert_bits(torch.rand(4), expected)  # probing draws no random numbers of the user's
    assert all(m.training is training for m in module.modules())


class TwoEpsilons(TwiceRounded):
    def __init__(self, size):
        super().__init__(size)
        self.eps = self.variance_epsilon


@pytest.mark.parametrize("make,attribute", [
    (TwiceRounded, "variance_epsilon"), (TwoEpsilons, "variance_epsilon"), (ZeroCentered, "eps"),
    (lambda size: nn.RMSNorm(size, eps=1e-6), "eps")])
def test_eps_is_read_in_each_forward(make, attribute):
    plain = randomize(make(32))
    module, x = copy.deepcopy(plain), input_of(7, 32)
    assert len(qshard.fuse_(module)) == 1
    for eps in (0.5, 2.0, None):
        if eps is None and type(plain) is not nn.RMSNorm:
            continue
        for one in (plain, module):
            setattr(one, attribute, eps)
        torch.testing.assert_close(module(x), plain(x))
        torch.testing.assert_close(copy.deepcopy(module)(x), plain(x))


class Held(MLP):
    """The activation is a function that an attribute holds."""

    def __init__(self, act):
        super().__init__()
        self.act_fn = None
        del self._modules["act_fn"]
        self.act_fn = act


class Clipped(nn.Module):
    def __init__(self):
        super().__init__()
        self.limit = 100.0

    def forward(self, x):
        return F.silu(x).clamp(max=self.limit)


def replace(module):
    module.act_fn = nn.Tanh()


@pytest.mark.parametrize("make,change", [
    (MLP, replace),
    (lambda: MLP(act=nn.GELU(approximate="tanh")), lambda m: setattr(m.act_fn, "approximate", "none")),
    (lambda: MLP(act=nn.GELU(approximate="tanh")), replace),
    (lambda: MLP(act=Clipped()), lambda m: setattr(m.act_fn, "limit", 0.01)),
    (lambda: Held(F.silu), lambda m: setattr(m, "act_fn", torch.tanh)),
    (lambda: Held(partial(F.gelu, approximate="tanh")), lambda m: setattr(m, "act_fn", F.gelu)),
])
def test_activations_are_changed_later(make, change):
    torch._dynamo.reset()
    plain = make()
    module, x = copy.deepcopy(plain), input_of(7, 32)
    (row,) = qshard.fuse_(module)
    assert row.pattern.startswith("down_proj(")
    module = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_bits(results(module, x), results(plain, x))
    torch.testing.assert_close(compiled(x), plain(x))
    for one in (plain, module):
        change(one)
    assert_bits(results(module, x), results(plain, x))
    torch.testing.assert_close(compiled(x), plain(x))


def test_compiles():
    torch._dynamo.reset()
    model = randomize(Block())
    qshard.fuse_(qshard.quantize_(model, RECIPES["float8_tensorwise"]))
    x = input_of(7, 32)
    expected = results(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, expected[0], rtol=1e-5, atol=1e-5)


def run_sharded():
    grads = []
    for fuses in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(ZeroCentered, OtherNames)).to(device())
        qshard.quantize_(model, RECIPES["float8_blockwise"])
        assert len(qshard.fuse_(model) if fuses else range(6)) == 6
        for module in (model[0].mlp, *model, model):
            fully_shard(module, mesh=full_mesh())
        model(input_of(7, 32).to(device())).square().sum().backward()
        grads.append([local(p.grad).clone() for p in model.parameters()])
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        check_gathered(model)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@on_worlds(2)
def test_sharded(world):
    world.run(run_sharded)
