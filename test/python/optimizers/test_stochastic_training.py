"""Weights without a master, over 500 steps: rounding to nearest loses what stochastic rounding keeps."""

import pytest
import torch
from helpers import FORMATS, ops
from torch import nn

import qshard
from qshard.formats import info_of

RECIPES = {
    recipe.format: recipe
    for recipe in (
        qshard.Float8CurrentScaling(),
        qshard.DelayedScaling(),
        qshard.Float8BlockScaling(),
        qshard.MXFP8BlockScaling(),
        qshard.NVFP4BlockScaling(),
        qshard.NVFP4BlockScaling(disable_2d_quantization=True),
    )
}
assert set(RECIPES) <= set(FORMATS)


def mlp():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


def train(recipe=None, stochastic_rounding=False, seed=0):
    """Mean loss of the last 50 steps of a student of a random teacher, and the student."""
    torch.manual_seed(seed)
    model, teacher = mlp(), mlp()
    if recipe:
        qshard.quantize_(
            model, recipe, keep_master=False, stochastic_rounding=stochastic_rounding
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    losses = []
    for _ in range(500):
        x = torch.randn(64, 32)
        loss = (model(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-50:]) / 50, model


@pytest.fixture(scope="module")
def plain_loss():
    return train()[0]


@pytest.mark.parametrize("format", RECIPES)
def test_stochastic_rounding_beats_nearest(format, plain_loss, report):
    nearest, stochastic = (train(RECIPES[format], rounds)[0] for rounds in (False, True))
    report.append(
        f"500 steps without a master, {format}: loss {stochastic:.4f} stochastic, {nearest:.4f} "
        f"nearest, {plain_loss:.4f} plain"
    )
    assert stochastic < 0.5 * nearest
    assert stochastic < (1.25 if info_of(format).code_bits == 8 else 2) * plain_loss


def test_the_seed_reproduces_it():
    recipe = RECIPES["nvfp4"]
    (loss, model), (again, _), (other, _) = (train(recipe, True, seed) for seed in (3, 3, 4))
    assert loss == again != other
    assert model[0].weight_rounding[2] == 500
    keys = [tuple(model[i].weight_rounding[:2].tolist()) for i in (0, 2)]
    assert keys[0] != keys[1]


def test_a_master_and_stochastic_rounding_exclude_each_other():
    with pytest.raises(ValueError, match="pass keep_master=False"):
        qshard.quantize_(mlp(), RECIPES["nvfp4"], stochastic_rounding=True)
    with pytest.raises(ValueError, match="keep_master=True: a master holds"):
        ops.quantize(torch.ones(4, 4), "nvfp4[stochastic]", keep_master=True)
