"""Optimizers of other packages beside plain twins: with a master every step is the plain one, bit for bit; without
one it is the plain step from the dequantized value, quantized. What takes no DTensors says so of plain ones alike.

Steps that a package compiles run here without the compiler, which takes minutes. test_torchao.py compiles some.
"""

import importlib

import pytest
import torch
from dist_helpers import error_of, full_mesh, on_ranks
from helpers import ops
from models import optimizer_table
from models.optimizer_twins import (
    ALL, EQUAL_MATRICES, EVEN_MATRICES, MATRICES, build, certify, set_gradients,
)

BUDGET_S = 240
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])


def of(package, name, **arguments):
    """A function that makes this optimizer over a model's parameters."""

    def make(model):
        return getattr(importlib.import_module(package), name)(model.parameters(), lr=1e-2, **arguments)

    return make


def muon(package, name):
    def make(model):
        kind = getattr(importlib.import_module(package), name)
        return kind([dict(params=list(model.parameters()), lr=1e-2, use_muon=True)])

    return make


SCHEDULE_FREE = dict(before=lambda optimizer: optimizer.train(), after=lambda optimizer: optimizer.eval())
# By name: what makes it, the shapes that it takes, and what its user calls.
EVERYWHERE = {
    "AdamWScheduleFree": (of("schedulefree", "AdamWScheduleFree"), ALL, SCHEDULE_FREE),
    "RAdamScheduleFree": (of("schedulefree", "RAdamScheduleFree"), ALL, SCHEDULE_FREE),
    "SGDScheduleFree": (of("schedulefree", "SGDScheduleFree"), ALL, SCHEDULE_FREE),
    "AdamW8bit": (of("torchao.optim", "AdamW8bit"), ALL, {}),
    "AdamW4bit": (of("torchao.optim", "AdamW4bit"), ALL, {}),
    "Muon": (muon("pytorch_optimizer", "Muon"), MATRICES, {}),
    "AdaMuon": (muon("pytorch_optimizer", "AdaMuon"), MATRICES, {}),
    "NorMuon": (muon("pytorch_optimizer", "NorMuon"), MATRICES, {}),
    "Lion": (of("pytorch_optimizer", "Lion", foreach=False), ALL, {}),
}
IN_ONE_PROCESS = EVERYWHERE | {
    "SOAP": (of("pytorch_optimizer", "SOAP"), ALL, {}),
    "Shampoo": (of("pytorch_optimizer", "Shampoo"), MATRICES, {}),
    "ScalableShampoo": (of("pytorch_optimizer", "ScalableShampoo"), MATRICES, {}),
    "Prodigy": (of("pytorch_optimizer", "Prodigy"), ALL, {}),
    "Adan": (of("pytorch_optimizer", "Adan"), ALL, {}),
    "bitsandbytes": (of("bitsandbytes.optim", "AdamW8bit"), ALL, {}),
}
NO_DTENSORS = ["SOAP", "Shampoo", "ScalableShampoo", "Prodigy", "Adan", "bitsandbytes"]
if torch.__version__ >= (2, 15):  # adds nothing in place to a list of norms of DTensors, as NorMuon does
    NO_DTENSORS.append("NorMuon")


def certify_uncompiled(make, shapes, arguments, keep_master, mesh=None):
    with torch.compiler.set_stance("force_eager"):
        return certify(make, shapes, keep_master=keep_master, mesh=mesh, **arguments)


@keep_or_not
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_in_one_process(name, keep_master):
    certify_uncompiled(*IN_ONE_PROCESS[name], keep_master)


@keep_or_not
@pytest.mark.parametrize("name", [name for name in EVERYWHERE if name not in NO_DTENSORS])
@on_ranks(2, devices=("cpu",))
def test_under_fsdp2(name, keep_master):
    certify_uncompiled(*EVERYWHERE[name], keep_master, (2,))


@pytest.mark.each_value
@keep_or_not
@pytest.mark.parametrize("name", ["AdamWScheduleFree", "AdamW8bit", "Muon"])
@on_ranks(4, devices=("cpu",))
def test_under_hsdp(name, keep_master):
    certify_uncompiled(*EVERYWHERE[name], keep_master, (2, 2))


@keep_or_not
@on_ranks(2, devices=("cpu",))
def test_muon_fsdp2_on_even_rows(keep_master):
    """It scatters parts of the same size, and takes meshes of one dimension."""
    certify_uncompiled(muon("muon_fsdp2", "Muon"), EVEN_MATRICES, {}, keep_master, (2,))


@keep_or_not
@on_ranks(2, devices=("cpu",))
def test_distributed_muon_beside_replicas(keep_master):
    """Each rank steps every second parameter, and gathers the others into quantized tensors."""
    certify_uncompiled(muon("pytorch_optimizer", "DistributedMuon"), EQUAL_MATRICES, {}, keep_master)


@pytest.mark.parametrize("name", NO_DTENSORS)
@on_ranks(2, devices=("cpu",))
def test_what_takes_no_dtensors_says_so_of_plain_ones_alike(name):
    make, shapes, _ = IN_ONE_PROCESS[name]
    models = build(shapes, True, full_mesh(2))
    set_gradients(0, *models)
    errors = [error_of(make(model).step) for model in models]
    assert errors[0] == errors[1] != "no error", errors


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_compiled_steps_without_a_master_name_what_works(name):
    make, _, _ = EVERYWHERE[name]
    ours, _ = build({"tall": ALL["tall"]}, False, None)
    before = ops.dequantize(ours.tall.detach())
    set_gradients(0, ours)
    with pytest.raises(Exception, match="bytes of .* are codes.*fused=True"):
        make(ours).step()
    assert torch.equal(ops.dequantize(ours.tall.detach()), before)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", optimizer_table.rows_of_packages())
def test_the_page_has_the_bytes(name):
    with torch.compiler.set_stance("force_eager"):
        optimizer_table.check_row(name)
