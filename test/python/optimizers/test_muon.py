"""Muons, of torch and as people write them: with a master the bits of the plain step, without one that step quantized.

On uneven rows, under FSDP2 and HSDP. Momentum that a step sends stays plain.
"""

import pytest
import torch
from dist_helpers import on_ranks
from example_scripts import example
from helpers import assert_same, ops, weight
from models.local_muons import ExchangingMuon, GatheringMuon
from models.optimizer_twins import MATRICES, STACKS, certify
from torch import nn


def muon_of_stacks():
    return example("muon").Muon


def stock(model):
    return torch.optim.Muon(model.parameters(), lr=1e-2)


def of_stacks(model):
    return muon_of_stacks()(model.parameters(), lr=1e-2)


MUONS = {
    "torch.optim.Muon": (stock, MATRICES),
    "stacks": (of_stacks, {**STACKS, "wide": MATRICES["wide"]}),
    "all-gather": (lambda model: GatheringMuon(model.parameters()), MATRICES),
    "all-to-all": (lambda model: ExchangingMuon(model.parameters()), MATRICES),
}
BUDGET_S = 60  # worlds of two and four ranks
names = pytest.mark.parametrize("name", MUONS)
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])


@keep_or_not
@pytest.mark.parametrize("name", ["torch.optim.Muon", "stacks"])
def test_in_one_process(name, keep_master):
    make, shapes = MUONS[name]
    certify(make, shapes, keep_master=keep_master)


@pytest.mark.each_value
@keep_or_not
@names
@on_ranks(2)
def test_under_fsdp2(name, keep_master):
    make, shapes = MUONS[name]
    certify(make, shapes, keep_master=keep_master, mesh=(2,))


@pytest.mark.each_value
@keep_or_not
@names
@on_ranks(4)
def test_under_hsdp(name, keep_master):
    make, shapes = MUONS[name]
    certify(make, shapes, keep_master=keep_master, mesh=(2, 2))


def test_a_stack_steps_as_its_matrices_do():
    stack = nn.Parameter(ops.quantize(weight(3, 40, 24), "float8_blockwise", keep_master=True))
    matrices = [nn.Parameter(matrix) for matrix in weight(3, 40, 24)]
    ours = muon_of_stacks()([stack], lr=0.1)
    theirs = torch.optim.Muon(matrices, lr=0.1)
    for step in range(3):
        stack.grad = weight(3, 40, 24, seed=step)
        for matrix, grad in zip(matrices, stack.grad):
            matrix.grad = grad.clone()
        ours.step(), theirs.step()
    moved, wanted = stack.detach() - weight(3, 40, 24), torch.stack(list(matrices)).detach() - weight(3, 40, 24)
    assert (moved - wanted).norm() < 0.02 * wanted.norm()  # of a batched product in bf16


def test_a_stack_of_torchs_is_refused_by_name():
    stack = nn.Parameter(ops.quantize(weight(2, 40, 24), "nvfp4", keep_master=True))
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        torch.optim.Muon([stack])
    with pytest.raises(ValueError, match="give it to another optimizer"):
        muon_of_stacks()([nn.Parameter(torch.zeros(3))])
    assert_same(stack, weight(2, 40, 24))
