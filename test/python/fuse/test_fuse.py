"""fuse_: modules of registered classes compute the same in fewer steps."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks
from helpers import saved_and_loaded
from models.weights import check_gathered, local
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


qshard.fuse.register(TwiceRounded, qshard.fuse.Norm(eps="variance_epsilon"))
qshard.fuse.register(ZeroCentered, qshard.fuse.Norm(zero_centered=True, keeps_dtype=True))
qshard.fuse.register(MLP, qshard.fuse.GatedMLP("gate_proj", "up_proj", "down_proj", "act_fn"))
qshard.fuse.register(OtherNames, qshard.fuse.GatedMLP("w1", "w3", "w2", F.silu))


class Block(nn.Module):
    def __init__(self, norm=TwiceRounded, mlp=MLP):
        super().__init__()
        self.norm, self.mlp = norm(32, eps=1e-6), mlp()

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
@pytest.mark.parametrize("norm", [TwiceRounded, ZeroCentered, nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("format", [None, "float8_blockwise"])
def test_fused_models_compute_as_unfused_ones(mlp, norm, format):
    model = randomize(nn.Sequential(Block(norm, mlp), Block(norm, mlp)))
    if format:
        qshard.quantize_(model, RECIPES[format])
    names, parameters = list(model.state_dict()), list(model.parameters())
    x = input_of(7, 32)
    expected = results(model, x)
    report = qshard.fuse_(model)
    assert [row.name for row in report] == ["0.norm", "0.mlp", "1.norm", "1.mlp"]
    assert not report.left
    kind = "LayerNorm" if norm is nn.LayerNorm else "RMSNorm"
    assert report[0].pattern == f"{kind}, eps=1e-06" and report[0].module == norm.__name__
    assert "swiglu of" in report[1].pattern and "0.mlp" in str(report)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(model[0].mlp, mlp) and isinstance(model[0].norm, norm)
    torch.testing.assert_close(results(model, x), expected, rtol=1e-4, atol=1e-4)
    assert not qshard.fuse_(model)  # it is fused
    for other in (copy.deepcopy(model), saved_and_loaded(model)):
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


@pytest.mark.parametrize("act, is_one", [
    (nn.SiLU(), True), (nn.GELU(approximate="tanh"), True), (nn.ReLU(), True), (nn.Sigmoid(), False)])
def test_quantized_gated_mlps_are_one_operator(act, is_one):
    model = qshard.quantize_(MLP(act=act, bias=True), RECIPES["float8_blockwise"])
    x = input_of(7, 32)
    expected = results(model, x)
    qshard.fuse_(model)
    with torch.profiler.profile(acc_events=True) as profiler:
        assert_bits(results(model, x), expected)
    ran = {event.key for event in profiler.key_averages()}
    assert ("qshard::swiglu_linear_forward" in ran) == is_one
    assert ("qshard::swiglu_linear_backward" in ran) == is_one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", [TwiceRounded, ZeroCentered, nn.RMSNorm])
def test_norms_in_other_dtypes(norm, dtype):
    plain = randomize(norm(96, eps=1e-3).to(dtype))
    fused = copy.deepcopy(plain)
    qshard.fuse_(fused)
    assert isinstance(fused, norm) and type(fused) is not norm
    for x in (input_of(7, 96, dtype=torch.bfloat16), input_of(7, 96)):
        if dtype == torch.bfloat16 and x.dtype == torch.float32 and norm is ZeroCentered:
            continue  # the plain one has the input's dtype, and computes by rounded weights
        y, expected = fused(x), plain(x)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-5)


def test_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    assert len(qshard.fuse_(model)) == 4
    assert model(torch.randn(7, 32, device="meta")).shape == (7, 32)


def test_replaced_forwards_and_hooks():
    module = MLP()
    module.forward = lambda x: x
    report = qshard.fuse_(module)
    assert not report and "its forward was replaced on the module" in str(report)
    module, seen = MLP(), []
    for part in (module, module.gate_proj):
        part.register_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    assert len(qshard.fuse_(module)) == 1 and not seen
    module(input_of(2, 32))
    assert seen == ["Linear", "MLP"]  # under the name that the class has


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
    assert [row.name for row in report] == ["0.norm", "1.norm", "1.mlp"]
    assert type(model[0].mlp) is MLP
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


@pytest.mark.parametrize("make,attribute", [
    (TwiceRounded, "variance_epsilon"), (ZeroCentered, "eps"),
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
        del self._modules["act_fn"]
        self.act_fn = act


qshard.fuse.register(Held, qshard.fuse.GatedMLP("gate_proj", "up_proj", "down_proj", "act_fn"))


def replace(module):
    module.act_fn = nn.Tanh()


def exactly(module):
    module.act_fn.approximate = "none"


@pytest.mark.parametrize("make,change", [
    (MLP, replace),
    (lambda: MLP(act=nn.GELU(approximate="tanh")), exactly),
    (lambda: MLP(act=nn.GELU(approximate="tanh")), replace),
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


def test_fused_models_compile():
    torch._dynamo.reset()
    model = randomize(Block())
    qshard.fuse_(qshard.quantize_(model, RECIPES["float8_tensorwise"]))
    x = input_of(7, 32)
    expected = results(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, expected[0], rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_fused_models_train_sharded():
    grads = []
    for fuses in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(ZeroCentered, OtherNames)).to(device())
        qshard.quantize_(model, RECIPES["float8_blockwise"])
        assert len(qshard.fuse_(model) if fuses else range(4)) == 4
        for module in (model[0].mlp, *model, model):
            fully_shard(module, mesh=full_mesh())
        model(input_of(7, 32).to(device())).square().sum().backward()
        grads.append([local(p.grad).clone() for p in model.parameters()])
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        check_gathered(model)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
