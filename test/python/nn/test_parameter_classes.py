"""Parameters of users' classes keep these when they are quantized, copied and dequantized, as in plain
torch."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from dist_helpers import device, on_ranks
from models.fsdp2 import shard
from torch import nn

import qshard

RECIPE = qshard.Float8BlockScaling()
X = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))


class Marked(nn.Parameter):
    """As vLLM's and Megatron's: frameworks find what they need in attributes of a class of their own."""


class Constructed(nn.Parameter):
    """Its constructor wants more than torch's, and it has a slot."""

    __slots__ = ("group",)

    def __new__(cls, data, requires_grad=True, *, group):
        parameter = super().__new__(cls, data, requires_grad)
        parameter.group, parameter.loader = group, len
        return parameter


MAKE = {
    "Parameter": nn.Parameter,
    "Marked": Marked,
    "Constructed": lambda data: Constructed(data, group="tp"),
}


def mlp(make=nn.Parameter):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8))
    for linear in (model[0], model[2]):
        linear.weight = make(linear.weight.detach())
    return model


def steps(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(X.to(model[0].bias.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("make", MAKE)
def test_there_and_back(make, keep_master):
    model, usual = mlp(MAKE[make]), mlp()
    weight, kind = model[0].weight, type(model[0].weight)
    for m in (model, usual):
        qshard.quantize_(m, RECIPE, keep_master=keep_master)
        steps(m)
    assert model[0].weight is weight and type(weight) is kind and qshard.is_quantized(weight)
    assert hasattr(weight, "fsdp_pre_all_gather") and str(weight).startswith("Parameter containing")
    assert torch.equal(model(X), usual(X))  # its steps are flushed as a Parameter's
    qshard.dequantize_(model)
    assert model[0].weight is weight and type(weight) is kind and not qshard.is_quantized(weight)
    if make == "Constructed":
        assert weight.group == "tp" and weight.loader is len
    steps(model)


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False).weight


COPIES = {
    "deepcopy": lambda module: copy.deepcopy(module).weight,
    "dtype": lambda module: copy.deepcopy(module).to(torch.bfloat16).weight,
    "to_empty": lambda module: copy.deepcopy(module).to_empty(device="cpu").weight,
    "pickle": lambda module: pickle.loads(pickle.dumps(module.weight)),
    "torch.save": saved,
    "queue": lambda module: pickle.loads(ForkingPickler.dumps(module.weight)),
    "detach": lambda module: module.weight.detach(),
    "data": lambda module: module.weight.data,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_have_the_classes_of_plain_ones(how):
    """Plain pickles hold a Parameter: torch writes torch._utils._rebuild_parameter into them."""
    plain = mlp(Marked)
    copied = COPIES[how](qshard.quantize_(mlp(Marked), RECIPE)[0])
    assert type(copied) is type(COPIES[how](plain[0]))
    assert qshard.is_quantized(copied)


def test_a_shallow_copy_shares_the_memory():
    weight = qshard.quantize_(mlp(MAKE["Constructed"]), RECIPE)[0].weight
    copied = copy.copy(weight)
    assert type(copied) is Constructed and copied.loader is len and copied.requires_grad
    with torch.no_grad():
        copied.fill_(2)
    assert torch.equal(weight.detach(), torch.full_like(weight, 2))


def test_compiled_code_takes_parameter_classes():
    linear = qshard.quantize_(mlp(Marked), RECIPE)[0]
    assert torch.equal(torch.compile(linear, fullgraph=True)(X), linear(X))


def trained_under_fully_shard(make):
    model = qshard.quantize_(mlp(make).to(device()), RECIPE)
    weight = model[0].weight
    shard(model)
    steps(model)
    return weight, model(X.to(device()))


@on_ranks(2)
def test_under_fully_shard():
    weight, output = trained_under_fully_shard(Marked)
    assert type(weight) is Marked  # the whole one, which FSDP2 has replaced by DTensors of its own
    assert torch.equal(output, trained_under_fully_shard(nn.Parameter)[1])
