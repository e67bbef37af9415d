"""qshard.debug: a write that some ranks made and others did not is an error on all ranks, which names the
parameter and the ranks, where without it the ranks would wait for each other."""

import os
import subprocess
import sys

import library_under_test
import pytest
import torch
import torch.distributed as dist
from dist_helpers import full_mesh, on_ranks
from models.fsdp2 import build
from models.training import adamw, batch, loss_of, train
from models.weights import check_gathered, local

import qshard

# The first agrees on one scale, the second on those of blocks that the ranks' boundaries cut.
formats = pytest.mark.parametrize("format", ["float8_tensorwise", "mxfp8"])
UP = "blocks.0.up.weight"


@torch.no_grad()
def write_on(ranks, param):
    if dist.get_rank() in ranks:
        local(param).mul_(2)


def error_of(call):
    qshard.debug()
    try:
        call()
    except RuntimeError as error:
        return str(error)
    finally:
        qshard.debug(False)
    return None


def check_error(error, name, wrote, did_not):
    assert error is not None and "\n" not in error, error
    assert f"{name} was written on {wrote} and not on {did_not}" in error, error
    assert "call qshard.flush(model) on all ranks" in error


@formats
@pytest.mark.parametrize("rows", [1, 257], ids=["one-row", "rows"])
@on_ranks(2, 3)
def test_a_gather_names_parameter_and_ranks(format, rows):
    model = build(format, rows=rows)
    optimizer = adamw(model)
    assert error_of(lambda: train(model, optimizer, steps=2)) is None  # all ranks write
    write_on([1], model.blocks[0].up.weight)
    others = [rank for rank in range(dist.get_world_size()) if rank != 1]
    names = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
    check_error(error_of(model.blocks[0].unshard), UP, "rank 1", names)
    # The error changed nothing: what it advises still works.
    qshard.flush(model)
    assert error_of(lambda: check_gathered(model)) is None


@formats
@on_ranks(2)
def test_a_forward_names_a_write_on_one_rank(format):
    """The first gather of a forward is that of FSDP2's root, in a hook of its own."""
    model = build(format)
    train(model, steps=1)
    write_on([0], model.head.weight)
    check_error(error_of(lambda: loss_of(model, batch(0))), "head.weight", "rank 0", "rank 1")


@formats
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@on_ranks(2)
def test_a_step_names_a_write_on_one_rank(format, named):
    """A weight without a gradient is not the optimizer's to write."""
    model = build(format)
    named_parameters = list(model.named_parameters())
    model.blocks[0].up.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(named_parameters if named else model.parameters(), lr=0.1)
    train(model, optimizer, steps=1)
    loss_of(model, batch(0)).backward()
    write_on([1], model.blocks[0].up.weight)
    number = [name for name, _ in named_parameters].index(UP)
    name = UP if named else f"parameter {number} of the optimizer's group 0"
    check_error(error_of(optimizer.step), name, "rank 1", "rank 0")
    qshard.flush(model)
    assert error_of(lambda: check_gathered(model)) is None


@formats
@on_ranks(4)
def test_replicas_with_other_writes_are_named(format):
    """A write on a row of the mesh: those replicas agree among themselves, and their peers do not."""
    model = build(format, mesh=full_mesh(2, 2, names=("replicate", "shard")))
    train(model, steps=1)
    write_on([2, 3], model.blocks[0].up.weight)
    error = error_of(model.blocks[0].unshard)
    check_error(error, UP, "ranks 2, 3", "ranks 0, 1")
    qshard.flush(model)
    write_on([3], model.blocks[0].up.weight)
    check_error(error_of(model.blocks[0].unshard), UP, "rank 3", "ranks 0, 1, 2")


SCRIPT = """
import library_under_test
from qshard._runtime import debug
print(debug.is_on)
"""


@pytest.mark.parametrize("level, expected", [("DETAIL", "True"), ("INFO", "False"), (None, "False")])
def test_torch_distributed_debug(level, expected):
    env = {name: value for name, value in os.environ.items() if name != "TORCH_DISTRIBUTED_DEBUG"}
    if level:
        env["TORCH_DISTRIBUTED_DEBUG"] = level
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(library_under_test.__file__), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == expected, done.stderr[-2000:]
