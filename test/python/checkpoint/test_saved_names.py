"""save_quantized writes what inference engines know: neither names that wrappers add, nor what qshard keeps."""

import json
from pathlib import Path

import pytest
import torch
from dist_helpers import device, full_mesh, on_ranks, shared_folder
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import qshard
from qshard.checkpoint import load_quantized, save_quantized

BUDGET_S = 60  # compiles linears

pytest.importorskip("safetensors", reason="needs safetensors")
NAMES = ["down.weight", "down.weight_scale_inv", "up.bias", "up.weight", "up.weight_scale_inv"]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def made():
    torch.manual_seed(0)
    return qshard.quantize_(Mlp().to(device()), qshard.Float8BlockScaling())


def saved_names(model, folder, **options):
    save_quantized(model, folder, layout="deepseek-fp8", **options)
    index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())
    return sorted(index["weight_map"])


def compiled(model):
    model.up = torch.compile(model.up, backend="aot_eager")
    return torch.compile(model, backend="aot_eager")


def test_names_of_compiled_modules(tmp_path):
    model = compiled(made())
    assert saved_names(model, tmp_path / "a") == NAMES
    load_quantized(model, tmp_path / "a")
    renamed = saved_names(model, tmp_path / "b", names={"up.bias": "fc.bias"})
    assert "fc.bias" in renamed and "up.bias" not in renamed
    asked = []
    saved_names(model, tmp_path / "c", names=lambda name: asked.append(name) or name)
    assert not any("_orig_mod" in name for name in asked)


class Named(nn.Module):
    """A user's module whose child has the name that wrappers use."""

    def __init__(self):
        super().__init__()
        self.module = made()


def test_a_users_own_names_stay(tmp_path):
    assert saved_names(Named(), tmp_path) == [f"module.{name}" for name in NAMES]


@on_ranks(1)
def test_names_under_ddp(tmp_path):
    names = saved_names(DistributedDataParallel(made()), tmp_path)
    assert names == NAMES


@on_ranks(2)
def test_the_rounding_state_of_gradients_is_not_saved():
    model = fully_shard(made(), mesh=full_mesh())
    qshard.reduce_gradients_(model, "float8", rounding="stochastic")
    assert any("gradient_rounding" in name for name in model.state_dict())
    with shared_folder() as folder:
        assert saved_names(model, folder) == NAMES
