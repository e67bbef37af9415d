"""Heads that share their weight with an embedding: plain unless they are asked for, and what the embedding
then looks up."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qshard

BUDGET_S = 45  # compiles lookups
ops = torch.ops.qshard
RECIPE = qshard.Float8BlockScaling()
EVERYTHING = {"filter_fn": lambda module, name: True}


class Scaled(nn.Embedding):
    """As Gemma's: a class of its own, which computes with what the stock one looks up."""

    def __init__(self, *args):
        super().__init__(*args)
        self.scale = 4.0

    def forward(self, ids):
        return super().forward(ids) * self.scale


class ByHand(nn.Embedding):
    """Looks its table up itself."""

    def forward(self, ids):
        return F.embedding(ids, self.weight) * 4.0


class Fails(nn.Embedding):
    def forward(self, ids):
        raise KeyError("on purpose")


def tied(kind=nn.Embedding):
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "embedding": kind(64, 32), "up": nn.Linear(32, 32), "head": nn.Linear(32, 64, bias=False),
    })  # fmt: skip
    model["head"].weight = model["embedding"].weight
    return model


# ---------------------------------------------------------------------------------- plain by default


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled, nn.EmbeddingBag])
@pytest.mark.parametrize("weights", ["quantized", "dynamic"])
def test_tied_heads_stay_plain(kind, weights):
    model = tied(kind)
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="head was left plain.*embedding embedding; a filter_fn"):
        qshard.quantize_(model, RECIPE, weights=weights)
    ids, x = torch.arange(8).view(2, 4), torch.randn(3, 32)
    assert torch.equal(model["embedding"](ids), plain["embedding"](ids))
    assert torch.equal(model["head"](x), plain["head"](x))
    assert not torch.equal(model["up"](x), plain["up"](x))
    assert type(model["head"]) is nn.Linear and type(model["embedding"]) is kind


def test_a_tied_head_is_taken_where_a_filter_takes_it():
    model = tied()
    with pytest.warns(UserWarning, match="head shares its weight with the embedding embedding, which now"):
        qshard.quantize_(model, RECIPE, **EVERYTHING)
    assert qshard.is_quantized(model["head"].weight)
    with pytest.raises(ValueError, match="no nn.Linear was chosen; 1 shares its weight with an embedding"):
        qshard.quantize_(nn.Sequential(model["embedding"], model["head"]), RECIPE)


# ------------------------------------------------------------------------- quantized at each use


def rounded(model):
    return ops.dequantize(ops.quantize(model["embedding"].weight.detach(), RECIPE.format))


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled, ByHand])
def test_an_embedding_of_a_class_of_its_own_looks_up_what_the_head_multiplies_by(kind):
    model = tied(kind)
    before = dict(model["embedding"].__dict__)
    qshard.quantize_(model, RECIPE, weights="dynamic", **EVERYTHING)
    ids, factor = torch.arange(8), 1.0 if kind is nn.Embedding else 4.0
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
        expected = rounded(each)
        found = each["embedding"](ids)
        assert torch.equal(found, expected[ids] * factor) and not torch.equal(found, each["embedding"].weight[ids])
        each["head"](found).sum().backward()
        assert each["embedding"].weight.grad is not None
        assert each["embedding"].weight is each["head"].weight
        assert type(each["embedding"].weight) is nn.Parameter
        compiled = torch.compile(each["embedding"], backend="aot_eager")
        assert torch.equal(compiled(ids), found)
        torch._dynamo.reset()
    qshard.dequantize_(model)
    left = model["embedding"].__dict__.keys() - {"_is_torch_compile"}  # a mark of torch 2.15
    assert left == before.keys()
    assert torch.equal(model["embedding"](ids), model["embedding"].weight[ids] * factor)


def test_a_forward_that_raises_shows_the_parameter_afterwards():
    model = tied(Fails)
    qshard.quantize_(model, RECIPE, weights="dynamic", **EVERYTHING)
    with pytest.raises(KeyError, match="on purpose"):
        model["embedding"](torch.arange(4))
    assert model["embedding"].weight is model["head"].weight
