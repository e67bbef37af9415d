"""What plain linears take, quantized ones take: weights that are views, nested tensors, wrapper subclasses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import FORMATS, fit, shown_to_dgrad
from nn_helpers import RECIPES, on_devices

import qshard

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


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("view", ["transposed", "columns", "every second row", "a row", "an expert, transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inference", [False, True])
def test_views_of_a_weight_alone(device, format, view, dtype, inference):
    """weight_only: plain linear of the codes' values, in the input's dtype."""
    take, dim = views(view)
    quantized = ops.quantize(draw(*((3, 64, 96) if dim == 3 else (64, 96)), seed=2, device=device), format)
    quantized.requires_grad_(not inference)
    plain = ops.dequantize(quantized.detach(), dtype=dtype).requires_grad_(not inference)
    x = draw(5, take(plain).shape[-1], device=device).to(dtype)
    with torch.inference_mode(inference):
        y, expected = ops.linear(x, take(quantized), weight_only=True), F.linear(x, take(plain))
    torch.testing.assert_close(y, expected)
    if not inference:
        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(quantized.grad.to(dtype), plain.grad)


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


# ---------------------------------------------------------------------------------- nested tensors


def nested(layout, device, requires_grad=False):
    parts = [draw(rows, 64, seed=rows, device=device) for rows in (3, 5, 1)]
    return torch.nested.nested_tensor(parts, layout=layout, requires_grad=requires_grad)


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("weights", ["quantized", "weight only", "dynamic", "functional"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", ["train", "no_grad", "inference"])
@pytest.mark.parametrize("format", FORMATS)
def test_nested_inputs_multiply_as_their_rows(device, layout, weights, bias, mode, format):
    """The parts are the rows of one input, as those of a plain one: its scales are of all of them."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=bias)).to(device)
    options = {"weights": "dynamic"} if weights == "dynamic" else {"weight_only": weights == "weight only"}
    layer = qshard.quantize_(layer, RECIPES[format], **options)[0]
    run = layer
    if weights == "functional":
        run = lambda x: F.linear(x, layer.weight, layer.bias)  # noqa: E731
    if mode != "train":
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            x = nested(layout, device)
            expected = run(torch.cat(x.unbind()))
            torch.testing.assert_close(torch.cat(run(x).unbind()), expected)
        return
    x = nested(layout, device, requires_grad=True)
    sum(y.square().sum() for y in run(x).unbind()).backward()
    grads, layer.weight.grad = layer.weight.grad, None
    rows = torch.cat([part.detach() for part in x.unbind()]).requires_grad_()
    y = run(rows)
    y.square().sum().backward()
    of_weight, of_rows = layer.weight.grad, rows.grad
    if weights == "functional":  # torch's own formula for nested tensors, on the values of the codes
        g = 2 * y.detach()
        of_weight, of_rows = g.t() @ rows.detach(), g @ ops.dequantize(layer.weight.detach())
    torch.testing.assert_close(grads, of_weight, rtol=1e-5, atol=1e-5 * grads.abs().max().item())
    torch.testing.assert_close(torch.cat(x.grad.unbind()), of_rows)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inputs_of_two_compiled_linears(layout, backend):
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    qshard.quantize_(model, qshard.Float8BlockScaling())
    x = nested(layout, "cpu")
    grads = []
    for run in (model, torch.compile(model, backend=backend)):
        sum(y.square().sum() for y in run(x).unbind()).backward()
        grads.append([p.grad for p in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*grads)


@on_devices
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "mxfp8"])
def test_a_stock_encoder_with_a_padding_mask(device, format):
    """torch makes nested tensors of it in eval mode."""
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2
    )
    encoder = encoder.to(device).eval()
    qshard.quantize_(encoder, RECIPES[format], filter_fn=lambda *_: True, keep_master=False)
    plain = copy.deepcopy(encoder)
    qshard.dequantize_(plain)
    mask = torch.zeros(2, 6, dtype=torch.bool, device=device)
    mask[0, 4:] = True
    x = draw(2, 6, 64, device=device)
    with torch.no_grad():
        y, expected = encoder(x, src_key_padding_mask=mask), plain(x, src_key_padding_mask=mask)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


# ----------------------------------------------------------------------------- wrapper subclasses


@pytest.mark.parametrize("module", [False, True])
def test_a_wrapper_subclass_goes_through(module):
    from torch.testing._internal.two_tensor import TwoTensor

    layer = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 96)), RECIPES["float8_blockwise"])[0]
    run = layer if module else lambda x: F.linear(x, layer.weight, layer.bias)
    x = TwoTensor(draw(5, 64), draw(5, 64, seed=2)).requires_grad_()
    y = run(x)
    assert type(y) is TwoTensor and torch.equal(y.a, run(x.a)) and torch.equal(y.b, run(x.b))
    y.sum().backward()
    assert type(x.grad) is TwoTensor and x.grad.shape == (5, 64)
