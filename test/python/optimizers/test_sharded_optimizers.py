"""torch's optimizers under FSDP2 and HSDP, on uneven rows and a rank without rows, beside plain twins."""

import pytest
import torch
from dist_helpers import error_of, full_mesh, on_ranks
from helpers import assert_same, is_quantized, ops, quantized_alike, value, weight
from models.optimizer_twins import ALL, build, certify, set_gradients, through_a_file
from torch import nn
from torch.distributed.tensor import DTensor

optim = torch.optim
OPTIMIZERS = {
    "AdamW fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "Adam for-loop": lambda p: optim.Adam(p, lr=1e-2, foreach=False),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adamax": lambda p: optim.Adamax(p),
    "ASGD": lambda p: optim.ASGD(p),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.5),
}
# Plain DTensors neither (docs/limits.md).
NO_DTENSORS = {
    "Adafactor": lambda p: optim.Adafactor(p),
    "Rprop": lambda p: optim.Rprop(p),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])


@pytest.mark.each_value
@pytest.mark.parametrize("name", OPTIMIZERS)
@keep_or_not
@on_ranks(2)
def test_under_fsdp2(keep_master, name):
    certify(lambda model: OPTIMIZERS[name](model.parameters()), ALL, keep_master=keep_master, mesh=(2,))


@keep_or_not
@on_ranks(4)
def test_under_hsdp(keep_master):
    make = OPTIMIZERS["AdamW fused"]
    certify(lambda model: make(model.parameters()), ALL, keep_master=keep_master, mesh=(2, 2))


@pytest.mark.parametrize("name", NO_DTENSORS)
@on_ranks(2, devices=("cpu",))
def test_what_takes_no_dtensors_says_so_of_plain_ones_alike(name):
    models = build(ALL, True, full_mesh(2))
    set_gradients(0, *models)
    errors = [error_of(NO_DTENSORS[name](model.parameters()).step) for model in models]
    assert errors[0] == errors[1], errors
    # torch 2.15 takes DTensors there.
    assert (errors[0] == "no error") == (name == "Rprop" and torch.__version__ >= "2.15"), errors


# ------------------------------------------------------------------------------ in one process


def test_radam_and_sparse_gradients():
    certify(lambda model: optim.RAdam(model.parameters(), lr=1e-2), ALL, keep_master=True)
    for keep_master in (True, False):
        param = nn.Parameter(ops.quantize(weight(64, 48), "float8_blockwise", keep_master=keep_master))
        twin = nn.Parameter(value(param))
        steps = [optim.SparseAdam([p], lr=1e-2).step for p in (param, twin)]
        for seed in range(3):
            for p in (param, twin):
                rows = torch.tensor([[1, 5, 9]])
                p.grad = torch.sparse_coo_tensor(rows, weight(3, 48, seed=seed), p.shape, check_invariants=True)
            for step in steps:
                step()
            if not keep_master:
                with torch.no_grad():
                    twin.copy_(ops.dequantize(quantized_alike(twin.detach(), param)))
            assert_same(param, twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@keep_or_not
def test_fused_adamw_with_bf16_states(keep_master, dtype):
    """Parameters of bf16 have them. Beside fp32 parameters torch 2.11 refuses them; where a version takes them, its
    step is the plain one's."""
    ours, theirs = build(ALL, keep_master, None, dtype)
    optimizers = [optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in (ours, theirs)]
    set_gradients(0, ours, theirs)
    for optimizer in optimizers:
        optimizer.step()
        for state in optimizer.state.values():
            state.update({name: state[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")})
    set_gradients(2, ours, theirs)
    if not keep_master:
        with torch.no_grad():
            for param, twin in zip(ours.parameters(), theirs.parameters()):
                twin.copy_(value(param))
    errors = [error_of(optimizer.step) for optimizer in optimizers]
    assert errors[0] == errors[1]
    assert (errors[0] == "no error") or dtype is torch.float32, errors
    if errors[0] != "no error":
        said = "same dtype" if torch.__version__ < "2.15" else "expected scalar type"
        assert said in errors[0]
        return
    for param, twin in zip(ours.parameters(), theirs.parameters()):
        shown = value(twin)
        if is_quantized(param) and not keep_master:
            shown = ops.dequantize(quantized_alike(shown, param))
        assert_same(param, shown)


# -------------------------------------------------- states that begin as clones of the parameter


class Averaging(optim.Optimizer):
    """Keeps an average of the weights, which begins as a clone, and an alias of each parameter."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["average"] = param.clone()
                state["alias"] = param.detach()
            param.sub_(param.grad, alpha=0.01)
            state["average"].lerp_(param, 0.1)


def averaging(model):
    return Averaging(model.parameters())


@keep_or_not
def test_states_cloned_from_a_parameter_become_plain(keep_master):
    ours, by = certify(averaging, ALL, keep_master=keep_master, states_too=False, reloads={})
    for param in ours.parameters():
        assert not is_quantized(by.state[param]["average"])
        assert is_quantized(by.state[param]["alias"]) == is_quantized(param)
    average = by.state[ours.wide]["average"]
    assert torch.equal(through_a_file(average), average)


@keep_or_not
@on_ranks(2, devices=("cpu",))
def test_sharded_states_cloned_from_a_parameter_become_plain(keep_master):
    ours, by = certify(averaging, ALL, keep_master=keep_master, mesh=(2,), states_too=False, reloads={})
    for param in ours.parameters():
        average = by.state[param]["average"]
        assert isinstance(average, DTensor) and not is_quantized(average.to_local())
        assert (average.shape, average.placements) == (param.shape, param.placements)
