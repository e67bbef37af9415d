"""What the tests of qshard.nn share."""

import pytest
import torch
from helpers import FORMATS

import qshard

RECIPES = {
    recipe.format: recipe
    for recipe in (
        qshard.Float8CurrentScaling(),
        qshard.DelayedScaling(),
        qshard.Float8RowwiseScaling(),
        qshard.Float8BlockScaling(),
        qshard.MXFP8BlockScaling(),
        qshard.MXFP8BlockScaling(weight_block=(1, 32)),
        qshard.NVFP4BlockScaling(),
        qshard.NVFP4BlockScaling(disable_2d_quantization=True),
    )
}
assert tuple(RECIPES) == FORMATS

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_gpu)])


def randomize(module, seed=0):
    """Values other than zeros and ones in all parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module


def doubles(module):
    """The parameters in float64, quantized ones as they are multiplied by."""
    ops = torch.ops.qshard
    return {
        name: (ops.dequantize(p.detach(), dtype=torch.float32) if qshard.is_quantized(p) else p.detach())
        .double()
        .cpu()
        for name, p in module.named_parameters()
    }


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_bits(actual, expected):
    """Tensors, or trees of them, of the same shape, dtype and bits."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_bits(actual[name], expected[name])
    elif isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected):
            assert_bits(a, b)
    else:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert torch.equal(actual, expected)


def output_and_gradients(model, run, x):
    """What run(x) gives, and the gradients of the model's parameters; from the random words of one seed."""
    model.zero_grad()
    torch.manual_seed(1)
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]
