"""qshard.report on wrappers, optimizers and checkpoints."""

import pytest
import torch
from dist_helpers import full_mesh, on_worlds
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import qshard


def build(recipe=None, **kwargs):
    return qshard.quantize_(nn.Sequential(nn.Linear(32, 32)), recipe or qshard.Float8BlockScaling(), **kwargs)


def said(model, optimizer=None):
    report = qshard.report(model, optimizer=optimizer)
    assert all(line in str(report).splitlines() for line in report.clients)
    return dict(line.split(": ", 1) for line in report.clients)


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize("keep_master", [True, False])
@pytest.mark.parametrize("persistent_state", [True, False])
def test_the_report_says_what_a_checkpoint_holds(keep_master, persistent_state):
    options = dict(keep_master=keep_master, persistent_state=persistent_state)
    text = said(build(qshard.DelayedScaling(), **options))["checkpoint"]
    assert text.startswith("plain tensors" if keep_master else "quantized tensors without masters")
    assert text.endswith("are in it" if persistent_state else "save qshard.QuantizationState(model)")
    assert "histories" not in said(build(**options))["checkpoint"]
    assert said(nn.Linear(3, 3))["checkpoint"] == "of a plain model"


def test_the_report_knows_optimizers():
    model = build()
    assert "optimizer" not in said(model)
    known = torch.optim.AdamW(model.parameters())
    assert said(model, known)["optimizer"] == "torch.optim.adamw.AdamW: known"
    bitsandbytes = type("AdamW8bit", (Own,), dict(__module__="bitsandbytes.optim.adamw"))
    assert said(model, bitsandbytes(model.parameters(), lr=1))["optimizer"].endswith(": known")
    assert ".Own: not known; a weight" in said(model, Own(model.parameters(), lr=1))["optimizer"]
    stale = torch.optim.AdamW(build().parameters())
    assert said(model, stale)["optimizer"].endswith("1 of 1 quantized weights that are trained are not in it")


def wrappers():
    assert said(fully_shard(build()))["wrapper"] == "fully_shard (FSDP2): known"
    assert said(fully_shard(build()))["checkpoint"].startswith("DTensors")
    ddp = nn.parallel.DistributedDataParallel(build())
    assert said(ddp)["wrapper"] == "DistributedDataParallel: known"
    plain = FullyShardedDataParallel(nn.Linear(32, 32), device_id=torch.device("cpu"))
    assert "FSDP1" in said(plain)["wrapper"] and "not known" in said(plain)["wrapper"]


def tensor_parallel():
    mesh = full_mesh()
    model = parallelize_module(nn.Sequential(nn.Linear(32, 32)), mesh, {"0": ColwiseParallel()})
    assert said(model)["wrapper"] == "DTensors without fully_shard: not known"
    quantized = qshard.quantize_(model, qshard.Float8BlockScaling(), tp_mesh=mesh)
    assert said(quantized)["wrapper"].startswith("tensor parallelism")
    assert said(quantized)["wrapper"].endswith(": known")


@on_worlds(2, devices=("cpu",))
def test_the_report_knows_wrappers(world):
    assert said(build())["wrapper"] == "none: known"
    world.run(wrappers)
    world.run(tensor_parallel)
