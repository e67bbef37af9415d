"""qshard.trace_fallbacks: what runs on values made of codes, in blocks that are nested or overlap; nothing
of a training step."""

import contextlib

import pytest
import torch
from helpers import FORMATS
from nn_helpers import RECIPES, on_devices

import qshard

BUDGET_S = 45
NORM = "aten::linalg_vector_norm"
ABS = "aten::abs"
OPTIMIZERS = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "AdamW, loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, foreach=True),
}


def model(recipe="float8_blockwise", device="cpu", **options):
    torch.manual_seed(0)
    last = torch.nn.Linear(96, 64, bias=False)
    linears = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), last)
    return qshard.quantize_(linears.to(device), RECIPES[recipe], filter_fn=lambda *_: True, **options)


def step(model, optimizer):
    x = torch.randn(4, 64, device=model[0].weight.device)
    model(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_training_step_lists_nothing(format, optimizer, keep_master, device):
    trained = model(format, device, keep_master=keep_master)
    made = OPTIMIZERS[optimizer](trained.parameters())
    with qshard.trace_fallbacks() as counts:
        for _ in range(2):
            step(trained, made)
    assert counts == {}


def test_an_optimizer_that_reads_a_weight_is_listed():
    trained = model()
    made = torch.optim.SGD(trained.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
    with qshard.trace_fallbacks() as counts:
        step(trained, made)
    assert counts == {"aten::_foreach_add.List": 1}


def test_writes_are_not_counted_and_reads_beside_them_are():
    weight = model()[0].weight.detach()
    plain = torch.ones(96, 64)
    for write, name in (
        (lambda: weight.mul_(0.5), None),
        (lambda: weight.add_(plain), None),
        (lambda: weight.add_(weight), "aten::add_.Tensor"),
        (lambda: plain.add_(weight), "aten::add_.Tensor"),
        (lambda: torch.add(plain, plain, out=weight), "aten::add.out"),
    ):
        with qshard.trace_fallbacks() as counts:
            write()
        assert counts == ({name: 1} if name else {})


def test_nested_blocks_count_by_themselves():
    weight = model()[0].weight.detach()
    with qshard.trace_fallbacks() as outer:
        weight.norm()
        with qshard.trace_fallbacks() as inner:
            weight.norm()
            weight.abs()
            with qshard.trace_fallbacks() as innermost:
                pass
        weight.norm()
    weight.norm()
    assert (outer, inner, innermost) == ({NORM: 3, ABS: 1}, {NORM: 1, ABS: 1}, {})
    with qshard.trace_fallbacks() as again:
        weight.abs()
    assert again == {ABS: 1}


def test_blocks_that_overlap_and_blocks_that_fail():
    weight = model()[0].weight.detach()
    first, second = qshard.trace_fallbacks(), qshard.trace_fallbacks()
    of_first = first.__enter__()
    weight.norm()
    of_second = second.__enter__()
    weight.abs()
    first.__exit__(None, None, None)
    weight.abs()
    second.__exit__(None, None, None)
    assert (of_first, of_second) == ({NORM: 1, ABS: 1}, {ABS: 2})
    with qshard.trace_fallbacks() as counts:
        with contextlib.suppress(ValueError), qshard.trace_fallbacks() as failed:
            weight.norm()
            raise ValueError
        weight.norm()
    assert (failed, counts) == ({NORM: 1}, {NORM: 2})
