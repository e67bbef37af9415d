"""fuse_ of norms that feed linears: where it finds them, that nothing but what is stored changes, and that
whatever else may look at a norm's result makes it run by itself."""

import contextlib
import copy
import functools
import inspect
import io

import pytest
import torch
from dist_helpers import device, full_mesh, on_worlds
from dist_models import local
from nn_helpers import RECIPES, assert_bits, no_gpu, randomize
from test_fuse import MLP, OtherNames, TorchNorm, TwiceRounded, ZeroCentered, rotary, tables
from test_norm_linear import has_fp8
from test_norm_linear import operators as ran_operators
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import qshard
from qshard.fuse import norms_into_linears as steps
from qshard.fuse.projections import Projections
from qshard.nn import fused as operators

SIZE = 64


class Attention(nn.Module):
    """As in Hugging Face's Llama."""

    def __init__(self, bias=False, size=SIZE):
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(size, size, bias=bias) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(size, size // 2, bias=bias) for _ in range(2))

    def forward(self, hidden_states, position_embeddings, mask=None, **kwargs):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, 8)
        q = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = rotary(q, k, cos, sin)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(*input_shape, -1)), None


class Checkpointing(nn.Module):
    """Decorates the forwards of its subclasses, as Hugging Face's GradientCheckpointingLayer."""

    is_checkpointed = False

    def __init_subclass__(cls):
        forward = cls.forward

        @functools.wraps(forward)
        def decorated(self, *args, **kwargs):
            if self.is_checkpointed and type(self).forward is decorated:
                return checkpoint(functools.partial(forward, self, **kwargs), *args, use_reentrant=False)
            return forward(self, *args, **kwargs)

        cls.forward = decorated


class Layer(Checkpointing):
    def __init__(self, norm=TwiceRounded, mlp=MLP, bias=False, size=SIZE):
        super().__init__()
        self.self_attn, self.mlp = Attention(bias, size), mlp(size, 2 * size)
        self.input_layernorm, self.post_attention_layernorm = norm(size), norm(size)

    def forward(self, hidden_states, position_embeddings, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states, position_embeddings=position_embeddings, **kwargs)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


ROWS = ["input_layernorm into self_attn.q_proj, k_proj, v_proj"]
ROWS += ["post_attention_layernorm into mlp.gate_proj, up_proj"]


def make(recipe="float8_blockwise", dtype=torch.float32, fuses=True, **kwargs):
    torch.manual_seed(0)
    layer = randomize(Layer(**kwargs)).to(dtype)
    if recipe:
        qshard.quantize_(layer, RECIPES[recipe])
    if fuses:
        qshard.fuse_(layer)
    return layer


def input_of(*shape, dtype=torch.float32):
    x = torch.randn(shape or (2, 5, SIZE), generator=torch.Generator().manual_seed(1))
    return x.to(dtype).requires_grad_()


def results(layer, x=None, times=1, call=None):
    x = input_of() if x is None else x
    layer.zero_grad()
    x.grad = None
    for _ in range(times):  # from the second on they add to .grad
        y = (layer if call is None else call)(x, tuple(t.to(x.device, x.dtype) for t in tables(1)))
        y.float().square().sum().backward()
    return y.detach(), x.grad, {n: p.grad for n, p in layer.named_parameters()}


class Counted:
    """Norms that were left to linears, or, with none=True, that none is."""

    def __init__(self, none=False):
        self.none = none

    def __enter__(self):
        self.function, self.count = steps._project, 0

        def project(*args):
            projections = None if self.none else self.function(*args)
            self.count += projections is not None
            return projections

        steps._project = project
        return self

    def __exit__(self, *error):
        steps._project = self.function


def check(layer, expected, x=None, **kwargs):
    """Bits of the norms by themselves, with so many norms left to linears."""
    with Counted(none=True):
        want = results(layer, x, **kwargs)
    with Counted() as counted:
        got = results(layer, x, **kwargs)
    assert counted.count == expected * kwargs.get("times", 1)
    assert_bits(got, want)
    return want


@pytest.fixture(params=[False, True], ids=["composed", "operator"])
def operator(request, monkeypatch):
    """Whether operators normalize, as they do on GPUs."""
    if request.param:
        monkeypatch.setattr(operators, "_takes_norm", lambda *_: True)
    return request.param


# --------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_norm_and_its_linears(recipe, bias, dtype, operator):
    check(make(recipe, dtype, bias=bias), 2, input_of(dtype=dtype), times=2)


@pytest.mark.parametrize("norm", [ZeroCentered, TorchNorm])
@pytest.mark.parametrize("mlp", [OtherNames, functools.partial(MLP, act=nn.GELU(approximate="tanh"))])
def test_bits_of_other_norms_and_mlps(norm, mlp, operator):
    check(make(norm=norm, mlp=mlp), 2)


@pytest.mark.parametrize("recipe", [None, "float8_blockwise"])
def test_nothing_else_changes(recipe):
    plain, layer = make(recipe, fuses=False), make(recipe, fuses=False)
    names, parameters = list(layer.state_dict()), list(layer.parameters())
    report = qshard.fuse_(layer)
    assert [row.pattern for row in report if row.name == ""] == ROWS
    assert [row.pattern for row in report if row.name == "self_attn"] == ["rotary embedding, by rotary"]
    assert report[0].module == "Layer" and len(report) == 6 and qshard.fuse_(layer) == []
    assert list(layer.state_dict()) == names
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    assert isinstance(layer, Layer) and isinstance(layer.self_attn, Attention)
    assert type(layer).__name__ == "Layer"
    assert inspect.signature(type(layer).forward) == inspect.signature(Layer.forward)
    torch.testing.assert_close(results(layer), results(plain), rtol=1e-3, atol=1e-3)
    check(layer, 2 if recipe else 0)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert type(other) is type(layer) and type(other.self_attn) is type(layer.self_attn)
        assert_bits(results(other), results(layer))
        check(other, 2 if recipe else 0)


def test_fused_at_any_time_and_in_pieces():
    expected = results(make())
    late, parts = make(None), make(fuses=False)
    qshard.quantize_(late, RECIPES["float8_blockwise"])
    for part in (parts.mlp, parts.self_attn, parts.post_attention_layernorm):
        assert len(qshard.fuse_(part)) == 1
    assert [row.pattern for row in qshard.fuse_(parts)] == [*ROWS, "RMSNorm, eps=1e-06"]
    for layer in (late, parts):
        check(layer, 2)
        assert_bits(results(layer), expected)


def test_rotary_functions_are_found_too(monkeypatch):
    seen, layer = [], make()
    module = qshard.nn.rotary
    monkeypatch.setattr("qshard.fuse.rotary.rotate", lambda *args: seen.append(1) or module.rotate(*args))
    check(layer, 2)
    assert len(seen) == 4


def test_called_by_others_it_is_the_norm():
    layer, x = make(), input_of()
    with Counted() as counted:
        y = layer.post_attention_layernorm(x)
        layer.mlp(y), layer.self_attn(y, tables(1))
    assert type(y) is torch.Tensor and counted.count == 0
    assert_bits(y, TwiceRounded.forward(layer.post_attention_layernorm, x))


def test_what_is_given_is_no_tensor():
    x = input_of()
    given = Projections(x, {})
    assert (given.shape, given.dtype, given.device) == (x.shape, x.dtype, x.device)
    assert (given.ndim, given.dim(), given.size(), given.size(-1)) == (3, 3, x.size(), SIZE)
    for use in (lambda: given + x, lambda: x * given, lambda: torch.relu(given), lambda: given[0],
                lambda: given.float()):
        with pytest.raises((TypeError, AttributeError)):
            use()


# --------------------------------------------------------------------------------- wrappers


@pytest.mark.parametrize("use_reentrant", [False, True, None])
def test_checkpointed(use_reentrant, operator):
    layer = make()
    expected = check(layer, 2)
    layer.is_checkpointed = use_reentrant is None  # within the decorator of its forward

    def call(x, tables):
        return checkpoint(layer, x, tables, use_reentrant=use_reentrant)

    with Counted() as counted:
        assert_bits(results(layer, call=None if use_reentrant is None else call), expected)
    assert counted.count > 2  # in backward again, as far as that goes


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles(backend, operator):
    torch._dynamo.reset()
    layer = make("float8_tensorwise")
    expected = results(layer)
    with Counted() as counted:
        got = results(layer, call=torch.compile(layer, fullgraph=True, backend=backend))
    assert counted.count == 2
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_layers_are_compiled_once():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            layer = make("float8_tensorwise")
            layer.compile(fullgraph=True, backend="aot_eager")
            results(layer)


def run_sharded(inner):
    grads = []
    for none in (True, False):
        model = nn.ModuleList(make() for _ in range(2)).to(device())
        for layer in model:
            for module in (*((layer.mlp,) if inner else ()), layer):
                fully_shard(module, mesh=full_mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            x = input_of().to(device())
            with Counted(none) as counted:
                for layer in model:
                    x = layer(x, tuple(t.to(device()) for t in tables(1)))
            assert counted.count == (0 if none else 2 if inner else 4)  # FSDP2 has hooks on what it shards
            x.square().mean().backward()
            optimizer.step()
        grads.append([local(p.grad).clone() for p in model.parameters()])
    assert_bits(*grads)


@pytest.mark.parametrize("inner", [False, True])
@on_worlds(2)
def test_sharded(world, inner):
    world.run(run_sharded, inner)


# ---------------------------------------------------------------------- where norms run by themselves


def seen_tensors(_, args, *more):
    assert all(isinstance(a, (torch.Tensor, tuple, type(None))) for a in args), args


WATCHES = {
    "forward": lambda m: m.register_forward_hook(seen_tensors),
    "forward pre": lambda m: m.register_forward_pre_hook(seen_tensors),
    "backward": lambda m: m.register_full_backward_hook(lambda *_: None),
    "own forward": lambda m: setattr(m, "forward", functools.partial(type(m).forward, m)),
    "compiled": lambda m: m.compile(backend="eager"),
}


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("part", ["post_attention_layernorm", "mlp", "mlp.up_proj"])
def test_what_others_see_is_called(part, watch):
    torch._dynamo.reset()
    layer = make()
    if (part, watch) == ("mlp.up_proj", "compiled"):
        pytest.skip("linears are operators, compiled or not")
    WATCHES[watch](layer.get_submodule(part))
    check(layer, 1)


def test_hooks_of_all_modules_are_called():
    layer = make()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(seen_tensors)
    try:
        check(layer, 0)
    finally:
        hook.remove()
    check(layer, 2)


class Wrapped(nn.Module):
    """As adapters wrap linears."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x) * 2


def replaced(layer, part):
    parent, _, name = part.rpartition(".")
    wrap = checkpoint_wrapper if part == "mlp" else Wrapped
    setattr(layer.get_submodule(parent), name, wrap(layer.get_submodule(part)))


@pytest.mark.parametrize("part, expected", [
    ("mlp", 1), ("mlp.up_proj", 1), ("self_attn.k_proj", 1), ("self_attn.o_proj", 2), ("mlp.down_proj", 2),
    ("input_layernorm", 1), ("mlp.act_fn", 1)])
def test_parts_that_are_replaced_later(part, expected):
    layer = make()
    replaced(layer, part)
    check(layer, expected)


class OtherAttention(Attention):
    """Reads what it is given by more than linears."""

    def forward(self, hidden_states, position_embeddings):
        q, k = self.q_proj(hidden_states) + hidden_states, self.k_proj(hidden_states)
        q, k = (x.unflatten(-1, (-1, 8)).transpose(1, 2) for x in (q, k))
        q, k = (x.transpose(1, 2).flatten(2) for x in rotary(q, k, *position_embeddings))
        return self.o_proj(q) + torch.cat([k, self.v_proj(hidden_states)], -1), None


def test_other_fused_modules_in_place():
    layer = make()
    layer.self_attn = qshard.quantize_(randomize(OtherAttention()), RECIPES["float8_blockwise"])
    assert len(qshard.fuse_(layer)) == 1  # its rotary embedding
    check(layer, 1)


@pytest.mark.parametrize("change", ["weight only", "dynamic", "one linear", "eps", "wide norm", "autocast"])
def test_what_operators_do_not_take(change):
    layer = make(None)
    linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    options = {"weight only": {"weight_only": True}, "dynamic": {"weights": "dynamic"}}.get(change, {})
    if change == "one linear":
        options["filter_fn"] = lambda m, *_: m not in (layer.self_attn.q_proj, layer.mlp.up_proj)
    assert linears and qshard.quantize_(layer, RECIPES["float8_blockwise"], **options)
    x, context = input_of(), contextlib.nullcontext()
    if change == "eps":
        layer = make(norm=lambda size: nn.RMSNorm(size, eps=1e-6))
        layer.input_layernorm.eps = layer.post_attention_layernorm.eps = None
    elif change == "wide norm":  # whose result is in fp32
        layer = layer.bfloat16()
        layer.input_layernorm.float(), layer.post_attention_layernorm.float()
        x = input_of(dtype=torch.bfloat16)
    elif change == "autocast":
        context = torch.autocast("cpu", torch.bfloat16)
    with context:
        check(layer, 1 if change == "wide norm" else 0, x)  # fp32 comes to the second


def test_under_transforms():
    layer, cos_sin = make(), tables(1)

    def loss(x):
        return layer(x, cos_sin).square().sum()

    with Counted() as counted:
        torch.func.grad(loss)(input_of().detach())
    assert counted.count == 0


# --------------------------------------------------------------------------------------- on GPUs


@no_gpu
@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_blockwise"])
def test_codes_alone_are_made_cuda(recipe):
    layer = make(recipe, torch.bfloat16, size=512).cuda()
    x = input_of(8, 5, 512, dtype=torch.bfloat16).detach().cuda().requires_grad_()
    if not has_fp8(x.device):
        pytest.skip("no FP8 GEMMs")
    check(layer, 2, x, times=2)
    ran, _ = ran_operators(results, layer, x)
    assert "_norm_linear_forward" in ran
    x = input_of(8, 640, 512, dtype=torch.bfloat16).detach().cuda().requires_grad_()
    positions = tuple(t.to("cuda", torch.bfloat16) for t in tables(1, 640))
    added = []
    for none in (True, False, True, False):  # workspaces are there from the second on
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with Counted(none):
            y = layer(x, positions)
        added.append(torch.cuda.memory_allocated() - before)
        del y
    assert added[2] - added[3] >= 2 * x.numel()  # codes of both norms' results


@no_gpu
@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_blockwise"])
def test_compiled_cuda(recipe):
    torch._dynamo.reset()
    layer = make(recipe, torch.bfloat16, size=512).cuda()
    x = input_of(8, 5, 512, dtype=torch.bfloat16).detach().cuda().requires_grad_()
    expected = results(layer, x)
    got = results(layer, x, call=torch.compile(layer, fullgraph=True))
    torch.testing.assert_close(got[0], expected[0], rtol=0.05, atol=0.05 * expected[0].abs().max().item())
