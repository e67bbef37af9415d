"""autocast is a property of the operators: one dtype in eager mode, in compiled code and in plain torch."""

import pytest
import torch
import torch.nn.functional as F
from helpers import FORMATS, fit
from nn_helpers import RECIPES, on_devices, randomize

import qshard
from qshard import nn

BUDGET_S = 45  # compiles linears
ops = torch.ops.qshard
B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def draw(*shape, seed=1, dtype=F32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def gradients_of(y, tensors):
    y.float().square().sum().backward()
    grads = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return [None if grad is None else grad.dtype for grad in grads]


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("weights", ["quantized", "weight only", "dynamic"])
@pytest.mark.parametrize("dtype", [F32, B16])
@pytest.mark.parametrize("to", [B16, F16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_has_the_dtypes_of_a_plain_one(device, format, weights, dtype, to, bias, needs_x, compiled):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=bias)).to(device)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=bias)).to(device)
    options = {"weights": "dynamic"} if weights == "dynamic" else {"weight_only": weights == "weight only"}
    qshard.quantize_(model, RECIPES[format], **options)
    dtypes = []
    for layer in (model, plain):
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        x = draw(32, 64, dtype=dtype, device=device).requires_grad_(needs_x)
        with torch.autocast(device, dtype=to):
            y = run(x)
        with torch.no_grad(), torch.autocast(device, dtype=to):
            inferred = run(x)
        given = [x, *layer.parameters()]
        dtypes.append([y.dtype, inferred.dtype, *gradients_of(y, given)])
    assert dtypes[0] == dtypes[1] and dtypes[0][0] == to


@on_devices
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "nvfp4"])
def test_modules_and_residuals(device, format, compiled):
    """As the same modules before quantize_; a sum with a residual in fp32 is in fp32."""
    torch._dynamo.reset()
    modules = {
        "linear": lambda: nn.Linear(64, 64),
        "added": lambda: nn.Linear(64, 64),
        "norm": lambda: nn.LayerNormLinear(64, 64),
        "mlp": lambda: nn.LayerNormMLP(64, 96, activation="swiglu", normalization="RMSNorm"),
    }
    for name, make in modules.items():
        results = []
        for quantizes in (True, False):
            module = randomize(make()).to(device)
            if quantizes:
                qshard.quantize_(module, RECIPES[format], filter_fn=lambda *_: True)
            keywords = {"residual": draw(8, 64, device=device)} if name == "added" else {}
            run = torch.compile(module, backend="aot_eager") if compiled else module
            with torch.autocast(device, dtype=B16):
                results.append(run(draw(8, 64, device=device), **keywords).dtype)
        assert results[0] == results[1], name


@on_devices
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "mxfp8"])
def test_autocast_casts_what_operators_take(device, format):
    x, gamma = draw(8, 64, device=device), torch.ones(64, device=device)
    gate, up = (ops.quantize(draw(fit(format, 96), 64, seed=seed, device=device), format) for seed in (2, 3))
    down = ops.quantize(draw(64, 96, seed=4, device=device), format)
    bias = torch.zeros(96, device=device)
    norm = {"eps": 1e-5, "rms": True, "format": format}
    with torch.autocast(device, dtype=B16):
        outputs = [
            F.linear(x, gate),
            ops.linear(x, gate, bias, format=format),
            ops.linear(x, gate, residual=torch.zeros(8, 96, device=device)),
            *ops.norm_linear(x, gamma, None, [gate, up], [bias, bias], with_input=True, **norm),
            ops.swiglu_mlp(x, gate, up, down, format=format, down_format=format, residual=x),
        ]
        with torch.autocast(device, enabled=False):
            assert ops.linear(x, gate).dtype == F32
    assert [y.dtype for y in outputs] == [B16] * len(outputs)


@on_devices
def test_autocast_holds_under_transforms(device):
    layer = torch.nn.Sequential(torch.nn.Linear(64, 96)).to(device)
    layer = qshard.quantize_(layer, RECIPES["float8_blockwise"])[0]
    with torch.autocast(device, dtype=B16):
        y, _ = torch.func.vjp(layer, draw(8, 64, device=device))
    assert y.dtype == B16


@on_devices
def test_inputs_are_kept_in_the_dtype_of_autocast(device):
    """As of a plain linear: the bytes of 16 bits, not of 32."""
    layer = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 96)).to(device), RECIPES["mxfp8"])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with torch.autocast(device, dtype=B16):
            layer(draw(32, 64, device=device))
    assert not any(t.dtype == F32 and t.shape == (32, 64) for t in kept)
