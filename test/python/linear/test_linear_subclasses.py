"""Subclasses of nn.Linear that multiply as it does, and what frameworks register in place of their weights.
The models are built as torchtitan 0.3 builds its own: every linear is a subclass, and a parallelize method
registers each rank's part of a weight as a plain parameter."""

import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel
import torch.nn as nn
import torch.nn.functional as F
from dist_helpers import full_mesh, on_ranks
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import qshard
from qshard import module_state

ops = torch.ops.qshard
RECIPES = {
    "float8_rowwise": qshard.Float8RowwiseScaling(),
    "float8_blockwise": qshard.Float8BlockScaling(),
    "float8_tensorwise": qshard.Float8CurrentScaling(),
    "nvfp4": qshard.NVFP4BlockScaling(),
}
X = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))


class Parallel(nn.Module):
    """As torchtitan's Module: it knows how its parameters are cut, and its forward may be replaced."""

    cut = None

    def parallelize(self, rank, ranks):
        for name, parameter in list(self.named_parameters(recurse=False)):
            if name == "bias" and self.cut == 1:
                continue
            part = parameter.detach().chunk(ranks, self.cut)[rank].clone()
            self.register_parameter(name, nn.Parameter(part))


class Linear(nn.Linear, Parallel):
    """Its attributes have names that qshard.nn.Linear uses for something else."""

    weight_only, style, parallel, weight_format = "mine", "mine", "mine", "mine"

    def __init__(self, inputs, outputs, cut=0):
        super().__init__(inputs, outputs)
        self.cut = cut


class Scaled(Linear):
    """Its forward is its own, and what it computes cannot be known."""

    def forward(self, input):
        return F.linear(input, self.weight, self.bias) * 0.5


class MLP(Parallel):
    def __init__(self, kind=Linear):
        super().__init__()
        self.up, self.down = kind(32, 48), kind(48, 32)
        self.down.cut = 1

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def mlp(kind=Linear, seed=0):
    torch.manual_seed(seed)
    return MLP(kind)


def plain_linear(inputs, outputs):
    return nn.Linear(inputs, outputs)


def step(model, run=None):
    model.zero_grad()
    output = (run or model)(X)
    output.square().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_equal(a, b):
    assert len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("weights", ["quantized", "dynamic"])
@pytest.mark.parametrize("weight_only", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_subclass_computes_what_nn_linear_does(recipe, weight_only, weights):
    model, twin = mlp(), mlp(plain_linear)
    for each in (model, twin):
        qshard.quantize_(each, RECIPES[recipe], weight_only=weight_only, weights=weights)
    assert_equal(step(model), step(twin))
    assert isinstance(model.up, Linear) and type(model.up).__name__ == "Linear"
    assert model.up.weight_only == model.up.style == model.up.weight_format == "mine"
    shown = f", format={module_state.find(model.up).weight_format}"
    assert shown + " at each use" * (weights == "dynamic") + ", weight_only=True" * weight_only + ")" in repr(model.up)
    assert re.sub(", format=[^)]*", "", repr(model)) == repr(mlp())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(copied):
    model = qshard.quantize_(mlp(), RECIPES["float8_blockwise"], weight_only=True)
    again = copied(model)
    assert_equal(step(again), step(model))
    assert type(again.up) is type(model.up)


def test_quantized_again_and_back():
    model = mlp()
    classes = [type(m) for m in model.modules()]
    state = {name: list(m.__dict__) for name, m in model.named_modules()}
    for recipe in RECIPES.values():
        qshard.quantize_(model, recipe)
    assert_equal(step(model), step(qshard.quantize_(mlp(), RECIPES["nvfp4"])))
    qshard.dequantize_(model)
    assert [type(m) for m in model.modules()] == classes
    assert {name: list(m.__dict__) for name, m in model.named_modules()} == state
    assert_equal(step(model), step(mlp()))


def test_a_forward_of_its_own_is_left():
    model = qshard.quantize_(mlp(Scaled), RECIPES["float8_blockwise"])
    assert type(model.up) is Scaled and qshard.is_quantized(model.up.weight)
    with pytest.raises(TypeError, match="weight_only cannot change how up, a Scaled, multiplies"):
        qshard.quantize_(mlp(Scaled), RECIPES["float8_blockwise"], weight_only=True)


@pytest.mark.parametrize("is_first", [False, True], ids=["shard, quantize", "quantize, shard"])
@on_ranks(2, devices=("cpu",))
def test_subclasses_train_under_fully_shard(is_first):
    model, twin = mlp(), mlp(plain_linear)
    for each in (model, twin):
        if is_first:
            qshard.quantize_(each, RECIPES["float8_blockwise"])
        fully_shard(each.up)
        fully_shard(each)
        if not is_first:
            qshard.quantize_(each, RECIPES["float8_blockwise"])
    assert isinstance(model.up, FSDPModule)
    for each in (model, twin):
        each(X).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p.grad._local_tensor, q.grad._local_tensor)


class Bare(nn.Linear):
    """Without attributes of its own."""


@pytest.mark.parametrize("whose", ["torch", "qshard"])
@on_ranks(2, devices=("cpu",))
def test_subclasses_train_under_tensor_parallelism(whose):
    styles = qshard.tensor_parallel if whose == "qshard" else torch.distributed.tensor.parallel
    gradients = []
    for kind in (Bare, nn.Linear):
        torch.manual_seed(0)
        model = MLP(kind)
        mesh = full_mesh(2)
        plan = {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        qshard.quantize_(model, RECIPES["float8_blockwise"], tp_mesh=mesh)
        model(X).square().mean().backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------- in place of quantized weights


def test_registered_parts_are_refused_before_anything_changed():
    model = qshard.quantize_(mlp(), RECIPES["float8_blockwise"])
    before = step(model)
    message = (
        r"register_parameter would put a plain parameter of shape \(24, 32\) in the place of the weight of "
        r"this Linear, which is quantized, of shape \(48, 32\).*comes first, then qshard.quantize_"
    )
    with pytest.raises(NotImplementedError, match=message):
        model.up.parallelize(0, 2)
    assert_equal(step(model), before)


@on_ranks(2, devices=("cpu",))
def test_a_model_that_is_parallelized_first_stays_quantized():
    model, rank = mlp(), dist.get_rank()
    late = qshard.quantize_(mlp(), RECIPES["float8_blockwise"])
    for module in (late.up, late.down):
        with pytest.raises(NotImplementedError, match="comes first, then qshard.quantize_"):
            module.parallelize(rank, 2)
    assert qshard.is_quantized(late.up.weight) and late.up.weight.shape == (48, 32)
    for module in (model.up, model.down):
        module.parallelize(rank, 2)
    qshard.quantize_(model, RECIPES["float8_blockwise"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        output = model(X)
        dist.all_reduce(output)  # of the value: enough for a step
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert [tuple(w.shape) for w in weights] == [(24, 32), (32, 24)]
    assert all(qshard.is_quantized(w) for w in weights)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 32, 32))


def test_an_assigned_plain_parameter_is_warned_of():
    model = nn.ModuleList([Linear(32, 32), Scaled(32, 32), Stack()])
    qshard.quantize_(model, RECIPES["float8_blockwise"], parameter_fn=lambda _, name: "experts" in name)
    for module, name in ((model[1], "weight"), (model[2], "experts")):
        message = re.escape(f".{name} of a {type(module).__name__} was quantized, and a plain")
        with pytest.warns(UserWarning, match=message) as caught:
            setattr(module, name, nn.Parameter(torch.randn(32, 32)))
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[2].experts = None
        model[1].weight = nn.Parameter(ops.quantize(torch.randn(32, 32), "mxfp8"))


def test_an_assigned_plain_parameter_of_a_subclass_is_quantized_at_each_use():
    model = qshard.quantize_(mlp(), RECIPES["float8_blockwise"])
    weight = torch.randn(48, 32)
    model.up.weight = nn.Parameter(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says so once
        output = model.up(X)
    twin = qshard.quantize_(mlp(plain_linear), RECIPES["float8_blockwise"]).up
    with torch.no_grad():
        twin.weight.copy_(weight)
    assert torch.equal(output, twin(X))
