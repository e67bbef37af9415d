"""What torch does to modules, done to quantized ones: moves and casts, weights that are computed or
given, torch.func, tied embeddings."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import on_ranks
from helpers import assert_same, ops, rounded, saved_and_loaded, value, weight
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

import qshard

RECIPE = qshard.Float8BlockScaling()
X = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8)).to(dtype)


def quantized(dtype=torch.float32, recipe=RECIPE, **kwargs):
    return qshard.quantize_(mlp(dtype), recipe, **kwargs)


# ------------------------------------------------------------------------------ moves and casts


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize(
    "recipe",
    [RECIPE, qshard.DelayedScaling(), qshard.NVFP4BlockScaling()],
    ids=lambda recipe: recipe.format,
)
@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.float(),
        lambda m: m.half().float(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float32),
    ],
    ids=["float", "half-float", "bfloat16", "to"],
)
def test_casts_leave_weights_quantized(move, recipe, keep_master):
    model = quantized(torch.bfloat16, recipe, keep_master=keep_master)
    weight, before = model[0].weight, copy.deepcopy(model[0].weight)
    dtype = move(mlp(torch.bfloat16))[0].weight.dtype
    move(model)
    assert model[0].weight is weight and qshard.is_quantized(weight) and weight.dtype == dtype
    before = before.detach()
    plain = mlp(torch.bfloat16)
    plain[0].weight.data.copy_(value(before))
    assert torch.equal(value(weight), move(plain)[0].weight)
    if keep_master:
        codes = [ops.codes(w.detach()).view(torch.uint8) for w in (weight, before)]
        assert torch.equal(*codes)
    model(X.to(dtype)).sum().backward()


@pytest.mark.parametrize("move", [lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")])
def test_meta_leaves_weights_quantized(move):
    model = move(quantized())
    assert model[0].weight.is_meta and ops.is_quantized(model[0].weight)
    model.to_empty(device="cpu").load_state_dict(mlp().state_dict())
    assert torch.equal(model(X), quantized()(X))


def test_double_says_what_to_do():
    model = quantized()
    with pytest.raises(TypeError, match=r"cannot become torch.float64.*qshard.dequantize_\(model\)"):
        model.double()
    assert qshard.is_quantized(model[0].weight)


def test_double_changes_nothing_of_the_model():
    model = nn.Sequential(nn.Linear(32, 32), quantized()).eval()
    model[0].requires_grad_(False)
    for change in (nn.Module.double, lambda m: m.to(torch.float64), lambda m: m.type(torch.float64)):
        with pytest.raises(TypeError, match="1.0.weight is quantized and cannot become torch.float64"):
            change(model)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model[0].double().weight.dtype == torch.float64


class Positions(nn.Embedding):
    pass


class Other(nn.Module):
    """Neither a linear nor an embedding."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(40))
        self.w = nn.Parameter(torch.randn(40, 32))


def attention():
    model = nn.MultiheadAttention(32, 4)
    return qshard.quantize_(model, RECIPE, parameter_fn=lambda p, name: name == "in_proj_weight")


def embedding_of_another_class():
    model = Tied(Positions(40, 32))
    return qshard.quantize_(model, RECIPE, filter_fn=lambda module, name: True)


def chosen_by_parameter_fn():
    model = nn.Sequential(Other(), Other())
    model[1].w = model[0].w
    return qshard.quantize_(model, RECIPE, parameter_fn=lambda p, name: name.endswith("w"))


def held_by_a_stock_module():
    layer = nn.Linear(32, 40)
    layer.weight = nn.Parameter(ops.quantize(layer.weight.detach(), RECIPE.format, keep_master=True))
    return layer


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, saved_and_loaded],
                         ids=["itself", "deepcopy", "torch.save"])
@pytest.mark.parametrize(
    "make",
    [attention, embedding_of_another_class, chosen_by_parameter_fn, held_by_a_stock_module],
    ids=lambda make: make.__name__,
)
def test_casts_leave_weights_of_any_module_quantized(make, copied):
    model = copied(make())
    named = dict(model.named_parameters(remove_duplicate=False))
    weights = {name for name, p in named.items() if qshard.is_quantized(p)}
    assert weights
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape)
    for cast, dtype in (
        (nn.Module.bfloat16, torch.bfloat16),
        (nn.Module.float, torch.float32),
        (lambda m: m.to(torch.float16), torch.float16),
        (lambda m: m.to_empty(device="cpu"), torch.float16),
    ):
        cast(model)
        after = dict(model.named_parameters(remove_duplicate=False))
        assert all(after[name] is named[name] for name in named)
        assert {name for name, p in after.items() if qshard.is_quantized(p)} == weights
        assert {p.dtype for p in after.values()} == {p.grad.dtype for p in after.values()} == {dtype}
    with pytest.raises(TypeError, match="cannot become torch.float64"):
        model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert qshard.dequantize_(model).double() is model
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_a_tied_embedding_stays_tied_through_casts():
    model = tied(torch.bfloat16).float()
    assert model.embedding.weight is model.head.weight and qshard.is_quantized(model.head.weight)


# ---------------------------------------------------------------------- plain weights in modules


def plain_twin_of_codes(values):
    return rounded(values.detach(), RECIPE.format)


def given_by_functional_call(model):
    weight = torch.randn(48, 32)
    return weight, lambda: functional_call(model, {"0.weight": weight}, X)


def computed_by_weight_norm(model):
    parametrizations.weight_norm(model[0])
    return model[0].weight, lambda: model(X)


def computed_by_a_parametrization(model):
    parametrize.register_parametrization(model[0], "weight", nn.Tanh(), unsafe=True)
    return model[0].weight, lambda: model(X)


def pruned(model):
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model[0].weight, lambda: model(X)


def assigned(model):
    model[0].weight = nn.Parameter(torch.randn(48, 32))
    return model[0].weight, lambda: model(X)


@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
@pytest.mark.parametrize(
    "give",
    [
        given_by_functional_call,
        computed_by_weight_norm,
        computed_by_a_parametrization,
        pruned,
        assigned,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.filterwarnings("ignore:.*and a plain parameter was put in its place")
def test_plain_weights_are_quantized_on_use(give, inference):
    model = quantized()
    weight, call = give(model)
    with torch.inference_mode() if inference else contextlib.nullcontext():
        output = call()
    hidden = F.gelu(F.linear(X, plain_twin_of_codes(weight), model[0].bias))
    assert torch.equal(output, F.linear(hidden, ops.dequantize(model[2].weight), model[2].bias))


def test_gradients_pass_straight_through_to_what_computes_a_weight():
    model = quantized()
    scale = torch.full((48, 1), 1.5, requires_grad=True)
    base = torch.randn(48, 32)
    functional_call(model[0], {"weight": base * scale}, X).sum().backward()
    assert torch.equal(scale.grad, (torch.ones(7, 48).t() @ X * base).sum(1, keepdim=True))


# --------------------------------------------------------------------------------- torch.func


def loss(model, parameters, x):
    return functional_call(model, parameters, x).square().mean()


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
def test_func_grad_gives_the_gradients_of_backward(keep_master):
    model = quantized(keep_master=keep_master)
    loss(model, {}, X).backward()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    grads = torch.func.grad(lambda p: loss(model, p, X))(parameters)
    for name, parameter in model.named_parameters():
        assert_same(grads[name], parameter.grad)
    x_grad = torch.func.grad(lambda x: loss(model, {}, x))(X)
    leaf = X.clone().requires_grad_()
    loss(model, {}, leaf).backward()
    assert_same(x_grad, leaf.grad)
    assert_same(torch.func.vjp(model, X)[0], model(X))
    assert_same(torch.func.vmap(model)(X.view(7, 1, 32)).view(7, 8), model(X))


@pytest.mark.parametrize(
    "call,match",
    [
        (lambda m: torch.func.grad(lambda x: torch.func.grad(lambda y: loss(m, {}, y))(x).sum())(X),
         "double backward is not supported"),
        (lambda m: torch.func.jvp(m, (X,), (X,)), "forward-mode"),
        (lambda m: torch.func.vmap(torch.func.grad(lambda x: loss(m, {}, x)))(X), "under vmap"),
        (lambda m: torch.func.vmap(functional_call, (None, 0, None))(
            m[0], {"weight": torch.randn(2, 48, 32)}, X
        ), "vmap over weights"),
    ],
    ids=["twice", "forward-mode", "per-sample", "vmap-weights"],
)
def test_transforms_that_are_not_supported_say_so(call, match):
    with pytest.raises((NotImplementedError, RuntimeError), match=match):
        call(quantized())


# ---------------------------------------------------- what a gathered weight serves reads codes

INDEX = torch.tensor([[3, 3, 7], [0, 19, 1]])
SERVED = {
    "linear": lambda w: F.linear(X, w),
    "mm": lambda w: X @ w.t(),
    "mv": lambda w: w @ X[0],
    "bmm": lambda w: torch.ones(2, 3, 20) @ w,
    "baddbmm": lambda w: torch.baddbmm(torch.ones(1), torch.ones(2, 3, 32), w.view(2, 10, 32).mT),
    "embedding": lambda w: F.embedding(INDEX, w),
    "embedding_bag": lambda w: F.embedding_bag(INDEX, w, mode="sum"),
    "conv2d": lambda w: F.conv2d(torch.ones(1, 32, 3, 3), w.view(20, 32, 1, 1)),
    "conv1d": lambda w: F.conv1d(torch.ones(1, 8, 9), w.view(20, 8, 4)),
}


@pytest.mark.parametrize("fmt", ["float8_blockwise", "nvfp4"])
@pytest.mark.parametrize("op", SERVED)
def test_served_operators_read_codes_and_others_the_value(op, fmt):
    q = ops.quantize(weight(20, 32), fmt, keep_master=True)
    codes = ops.dequantize(q).requires_grad_()
    leaf = q.detach().requires_grad_()
    outputs = SERVED[op](leaf), SERVED[op](codes)
    assert_same(*(o.detach() for o in outputs))
    for output in outputs:
        output.square().sum().backward()
    assert_same(leaf.grad, codes.grad)
    assert_same((q + 1), value(q) + 1)


class Tied(nn.Module):
    def __init__(self, embedding=None):
        super().__init__()
        self.embedding = embedding or nn.Embedding(40, 32)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x))


def tied(dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    return qshard.quantize_(Tied().to(dtype), RECIPE, filter_fn=lambda module, name: True, **kwargs)


def trained_losses(wrap):
    from dist_helpers import full_mesh
    from torch.distributed.fsdp import fully_shard

    model = tied()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp2":
        fully_shard(model, mesh=full_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, index = [], torch.arange(12).view(3, 4)
    for _ in range(3):
        output = model(index)
        losses.append(F.cross_entropy(output.view(12, 40), index.view(-1)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@on_ranks(2, devices=("cpu",))
def test_a_tied_embedding_is_the_same_in_one_process_ddp_and_fsdp2():
    losses = {wrap: trained_losses(wrap) for wrap in ("alone", "ddp", "fsdp2")}
    assert losses["alone"] == losses["ddp"] == losses["fsdp2"], losses


@pytest.mark.parametrize("layer", [
    torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
    torch.nn.MultiheadAttention(64, 4, batch_first=True),
], ids=lambda layer: type(layer).__name__)
def test_operators_of_whole_layers_read_codes(layer):
    """In eval mode without gradients torch calls one operator for all of it."""
    x = torch.randn(3, 7, 64)
    inputs = (x, x, x) if type(layer) is torch.nn.MultiheadAttention else (x,)
    qshard.quantize_(layer.eval(), qshard.Float8BlockScaling(), parameter_fn=lambda p, name: p.dim() == 2)
    outputs = []
    with torch.no_grad():
        for is_enabled in (True, False):
            torch.backends.mha.set_fastpath_enabled(is_enabled)
            try:
                outputs.append(layer(*inputs))
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
