"""torch.save(model.state_dict()) of models with masters: plain tensors, the masters' own memory."""

import copy
import io
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ops, value
from torch import nn

import qshard

RECIPES = [
    qshard.Float8CurrentScaling(),
    qshard.DelayedScaling(amax_history_len=4),
    qshard.Float8BlockScaling(),
    qshard.MXFP8BlockScaling(),
    qshard.NVFP4BlockScaling(),
]
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.format)

READ = """
import sys, torch
for file in sys.argv[1:]:
    state = torch.load(file, weights_only=True)
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    torch.save({name: tensor.clone() for name, tensor in state.items()}, file)
assert not any("qshard" in name for name in sys.modules)
"""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.up = nn.Linear(32, 64)
        self.head = nn.Linear(64, 32, bias=False)
        self.output = nn.Linear(32, 48, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.head(self.up(self.embedding(x)).relu()))


def build(recipe, seed=0, **kwargs):
    torch.manual_seed(seed)
    return qshard.quantize_(Model(), recipe, filter_fn=lambda module, name: True, **kwargs)


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(12)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_it_loads_where_qshard_is_not_installed(tmp_path):
    models, files = [build(recipe) for recipe in RECIPES], []
    for i, model in enumerate(models):
        step(model)
        files.append(tmp_path / f"{i}.pt")
        torch.save(model.state_dict(), files[-1])
        weights = sum(p.numel() * 4 for p in model.parameters())
        assert files[-1].stat().st_size < weights + 16 * 1024
    # Isolated: no PYTHONPATH to find it by.
    subprocess.run([sys.executable, "-I", "-c", READ, *map(str, files)], check=True)
    x = torch.arange(12)
    for recipe, model, file in zip(RECIPES, models, files):
        other = build(recipe, seed=1)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(model(x), other(x))
        step(model)
        step(other)
        assert torch.equal(model(x), other(x))


@recipes
def test_what_is_loaded_into_it_is_seen(recipe, tmp_path):
    model, other = build(recipe), build(recipe, seed=1)
    step(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    x = torch.arange(12)
    assert torch.equal(model(x), other(x))
    for name, tensor in other.state_dict().items():
        if name.endswith("weight"):
            tensor.mul_(2)
    assert torch.equal(value(other.up.weight), value(model.up.weight) * 2)
    assert not torch.equal(model(x), other(x))


def test_ties_parameters_and_what_has_no_master():
    model = build(RECIPES[2])
    state = model.state_dict()
    assert state["embedding.weight"].data_ptr() == state["output.weight"].data_ptr()
    assert state["up.weight"].untyped_storage().nbytes() == 64 * 32 * 4
    assert model.state_dict(keep_vars=True)["up.weight"] is model.up.weight
    assert qshard.is_quantized(build(RECIPES[2], keep_master=False).state_dict()["up.weight"])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(ops.codes(loaded.up.weight).float(), ops.codes(model.up.weight).float())
    assert type(copy.deepcopy(model).state_dict()["up.weight"]) is torch.Tensor


@recipes
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
def test_assigned_to_a_model_on_meta_it_goes_on_bit_for_bit(recipe, keep_master):
    model = build(recipe, keep_master=keep_master)
    for _ in range(3):
        step(model)
    plain = {name: value(t) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    with torch.device("meta"):
        other = qshard.quantize_(Model(), recipe, keep_master=keep_master, filter_fn=lambda *_: True)
    other.load_state_dict(copy.deepcopy(plain), assign=True)
    other.embedding.weight = other.output.weight  # as of plain models, assignment unties
    x = torch.arange(12)
    assert qshard.is_quantized(other.up.weight) and torch.equal(model(x), other(x))
    wrong = {**plain, "up.weight": torch.zeros(1, 32)}
    with pytest.raises(RuntimeError, match="size mismatch for up.weight"):
        other.load_state_dict(wrong, assign=True)
