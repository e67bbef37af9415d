"""qshard.dequantize_: back to plain modules and the same parameters; and what quantize_ says."""

import copy
import warnings

import pytest
import torch
from dist_helpers import full_mesh, on_ranks
from helpers import ops, value
from models.blocks import Model
from models.formats import RECIPES
from models.training import adamw, train
from models.weights import different, local_values
from torch import nn
from torch.distributed.fsdp import fully_shard

import qshard

RECIPE = qshard.Float8BlockScaling()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8))


def steps(model, optimizer, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        model(torch.randn(7, 32, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize(
    "recipe",
    [RECIPE, qshard.DelayedScaling(), qshard.NVFP4BlockScaling()],
    ids=lambda recipe: recipe.format,
)
def test_the_way_back(recipe, keep_master):
    model = mlp()
    before, types = dict(model.named_parameters()), [type(m) for m in model.modules()]
    attributes = [set(vars(m)) for m in model.modules()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    qshard.quantize_(model, recipe, keep_master=keep_master)
    steps(model, optimizer, range(3))
    values = {name: value(p) for name, p in model.named_parameters()}
    assert qshard.dequantize_(model) is model
    assert [type(m) for m in model.modules()] == types
    assert [set(vars(m)) for m in model.modules()] == attributes
    hooks = ("_load_state_dict_pre_hooks", "_state_dict_pre_hooks", "_state_dict_hooks")
    assert not any(getattr(m, name) for m in model.modules() for name in hooks)
    assert list(model.state_dict()) == list(mlp().state_dict())
    for name, parameter in model.named_parameters():
        assert parameter is before[name] and type(parameter) is nn.Parameter
        assert not qshard.is_quantized(parameter) and parameter.dtype == torch.float32
        assert torch.equal(parameter, values[name])
    twin = mlp()
    twin.load_state_dict(values)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, range(3, 5))
    steps(twin, twin_optimizer, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


def test_tied_and_on_meta():
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    model["head"].weight = model["embedding"].weight
    qshard.dequantize_(qshard.quantize_(model, RECIPE, filter_fn=lambda *_: True))
    assert model["head"].weight is model["embedding"].weight
    assert type(model["embedding"]) is nn.Embedding
    meta = qshard.dequantize_(qshard.quantize_(mlp().to("meta"), RECIPE))
    assert meta[0].weight.is_meta and not ops.is_quantized(meta[0].weight)


def test_a_weight_in_use_changes_nothing():
    model = qshard.quantize_(mlp(), RECIPE)
    output = model(torch.randn(3, 32))
    with pytest.raises(RuntimeError, match="qshard.dequantize_: .* still alive"):
        qshard.dequantize_(model)
    assert qshard.is_quantized(model[0].weight) and output.requires_grad


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", ["float8_blockwise", "nvfp4"])
@on_ranks(3, devices=("cpu",))
def test_under_fully_shard(format, keep_master):
    def sharded():
        torch.manual_seed(0)
        model = Model(48, format=format)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=full_mesh())
        return model

    model = sharded()
    optimizer = adamw(model)
    qshard.quantize_(model, RECIPES[format], keep_master=keep_master)
    qshard.dequantize_(model)
    assert not any(qshard.is_quantized(p) for p in model.parameters())
    twin = sharded()
    if not keep_master:
        for a, b in zip(twin.parameters(), model.parameters()):
            a.to_local().detach().copy_(b.to_local())
    assert not different(local_values(model), local_values(twin))
    assert train(model, optimizer) == train(twin)
    with pytest.raises(RuntimeError, match="before the first forward"):
        qshard.dequantize_(model)


class Same(nn.Module):
    def forward(self, weight):
        return weight + 0


@on_ranks(2, devices=("cpu",))
def test_linears_of_which_a_library_has_made_a_class():
    """Their class stays a subclass of qshard's linear, which then computes what a plain one does."""
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    sharded, parametrized = (qshard.quantize_(mlp(), RECIPE, keep_master=True) for _ in range(2))
    for module in (sharded[0], sharded):
        fully_shard(module, mesh=full_mesh())
    nn.utils.parametrize.register_parametrization(parametrized[0], "weight", Same())
    for model in (sharded, parametrized):
        qshard.dequantize_(model)
        assert torch.equal(model(x), mlp()(x))


# ------------------------------------------------------------------------- what quantize_ says


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 32, 16))
        self.position = nn.Parameter(torch.randn(1, 50, 32))
        self.router = nn.Linear(32, 4)


def test_matrices_that_stay_plain_are_named():
    with pytest.warns(UserWarning, match="quantize_: 0.w1 look like weights and were left plain"):
        qshard.quantize_(nn.Sequential(Experts()), RECIPE)
    with pytest.warns(UserWarning, match="1.in_proj_weight"):
        qshard.quantize_(nn.Sequential(nn.Linear(32, 32), nn.MultiheadAttention(32, 2)), RECIPE)
    with pytest.warns(UserWarning, match="quantize_: 0.w1 look like weights and were left plain"):
        qshard.quantize_(nn.Sequential(Experts()), RECIPE, filter_fn=lambda module, name: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qshard.quantize_(nn.Sequential(Experts()), RECIPE, parameter_fn=lambda *_: False)
        plain = [nn.Conv2d(16, 16, 16), nn.Embedding(32, 32), nn.LSTM(32, 32), nn.LayerNorm([32, 32])]
        qshard.quantize_(nn.Sequential(nn.Linear(32, 32), *plain), RECIPE)


def test_adapters_are_named():
    adapters = nn.ModuleDict({"default": nn.Linear(32, 16)})
    layer = nn.ModuleDict({"lora_A": adapters, "base": nn.Linear(32, 32)})
    with pytest.warns(UserWarning, match="lora_A.default look like LoRA adapters"):
        qshard.quantize_(layer, RECIPE)
    assert qshard.is_quantized(layer["lora_A"]["default"].weight)


@pytest.mark.parametrize(
    "keep_master,trained,warns",
    [(False, False, True), (False, True, False), (True, False, False)],
)
def test_the_first_sum_into_a_frozen_weight_without_a_master_warns(keep_master, trained, warns):
    layer = qshard.quantize_(nn.Linear(32, 32), RECIPE, keep_master=keep_master)
    layer.weight.requires_grad_(trained)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as seen, torch.no_grad():
            warnings.simplefilter("always")
            layer.weight.add_(1e-3)
    finally:
        torch.set_warn_always(False)
    assert [r"qshard.dequantize_(model)" in str(w.message) for w in seen] == [True] * warns
