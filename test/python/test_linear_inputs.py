"""What plain linears take, quantized ones take: weights that are views."""

import pytest
import torch
import torch.nn.functional as F
from helpers import FORMATS, fit, shown_to_dgrad
from nn_helpers import on_devices

import qshard  # noqa: F401

ops = torch.ops.qshard


def draw(*shape, seed=1, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


# ------------------------------------------------------------------------- views of the weight


def views(experts):
    return {
        "transposed": (lambda w: w.t(), 2),
        "columns": (lambda w: w[:, :32], 2),
        "every second row": (lambda w: w[::2], 2),
        "a row": (lambda w: w[3], 2),
        "an expert, transposed": (lambda w: w[1].mT, 3),
        "columns of an expert": (lambda w: w[1, :, 16:48], 3),
    }[experts]


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("view", ["transposed", "columns", "every second row", "a row", "an expert, transposed",
                                  "columns of an expert"])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("keep_master", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_views_of_a_weight_go_the_way_of_matmul(device, format, view, leading, bias, keep_master, inference):
    take, dim = views(view)
    drawn = draw(*((3, 64, 96) if dim == 3 else (64, 96)), seed=2, device=device)
    quantized = ops.quantize(drawn, format, keep_master=keep_master)
    shown = take(quantized)
    x = draw(*leading, shown.shape[-1], device=device)
    b = draw(*shown.shape[:1] if shown.dim() == 2 else (), seed=3, device=device) if bias else None
    if inference:
        with torch.inference_mode():
            y, expected = F.linear(x, shown, b), x @ shown.t()
    else:
        y, expected = F.linear(x, shown, b), x @ shown.t()
    torch.testing.assert_close(y, expected if b is None else expected + b)


@pytest.mark.parametrize("format", FORMATS)
def test_a_tied_autoencoder_trains(format):
    """One weight, read both ways."""
    weight = torch.nn.Parameter(ops.quantize(draw(fit(format, 64), 96, seed=2), format))
    plain = torch.nn.Parameter(ops.dequantize(weight.detach()))
    x = draw(8, 96)
    h = F.linear(x, weight)
    F.linear(h, weight.t()).sum().backward()
    grads = [weight.grad]
    # A format of two images multiplies by the other one here.
    back = torch.nn.Parameter(shown_to_dgrad(weight.detach()))
    h = F.linear(x, plain)
    F.linear(h, back.t()).sum().backward()
    grads.append(plain.grad + back.grad)
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2 * grads[1].abs().max().item())


def test_what_does_not_fit_is_an_error_of_matmul():
    weight = ops.quantize(draw(64, 96), "float8_blockwise")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        F.linear(draw(5, 96), weight.t())
