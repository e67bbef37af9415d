"""torchao's low-bit optimizers, which compile their steps, over weights with masters."""

import pytest
import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

import qshard


def train(quantized, optimizer_type, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    if quantized:
        qshard.quantize_(model, qshard.Float8BlockScaling(), weight_only=True)
    optimizer = optimizer_type(model.parameters(), lr=1e-2)
    for step in range(steps):
        # The same gradients for both models: what is compared is the optimizer.
        for i, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + i)
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("optimizer_type", [AdamW8bit, AdamW4bit, AdamWFp8], ids=lambda t: t.__name__)
def test_steps_are_those_of_a_plain_parameter(optimizer_type):
    model, plain = train(True, optimizer_type), train(False, optimizer_type)
    for (name, param), other in zip(model.named_parameters(), plain.parameters()):
        assert torch.equal(param.detach() * 1, other.detach()), name
    weight = model[0].weight.detach()
    assert torch.allclose(qshard.ops.dequantize(weight), weight * 1, rtol=0.07, atol=1e-3)
