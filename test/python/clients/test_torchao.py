"""torchao's low-bit optimizers, which compile their steps, over weights with masters."""

import pytest
import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

import qshard

BUDGET_S = 75  # compiles its steps


def build(quantized, optimizer_type, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    if quantized:
        qshard.quantize_(model, qshard.Float8BlockScaling(), weight_only=True)
    return model, optimizer_type(model.parameters(), lr=1e-2)


def train(model, optimizer, steps=range(3)):
    for step in steps:
        # The same gradients for both models: what is compared is the optimizer.
        for i, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + i)
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return model


types = pytest.mark.parametrize("optimizer_type", [AdamW8bit, AdamW4bit, AdamWFp8], ids=lambda t: t.__name__)


@types
def test_steps_are_those_of_a_plain_parameter(optimizer_type):
    model, plain = (train(*build(quantized, optimizer_type)) for quantized in (True, False))
    for (name, param), other in zip(model.named_parameters(), plain.parameters()):
        assert torch.equal(param.detach() * 1, other.detach()), name
    weight = model[0].weight.detach()
    assert torch.allclose(qshard.ops.dequantize(weight), weight * 1, rtol=0.07, atol=1e-3)


@types
def test_saved_states_go_on_where_they_were(optimizer_type, tmp_path):
    model, optimizer = build(True, optimizer_type)
    train(model, optimizer, range(2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state")
    other, second = build(True, optimizer_type, seed=1)
    saved = torch.load(tmp_path / "state")
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(2, 4))
    train(other, second, range(2, 4))
    for (name, param), loaded in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(param.detach() * 1, loaded.detach() * 1), name
