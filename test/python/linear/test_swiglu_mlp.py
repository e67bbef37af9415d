"""swiglu_mlp is linear, silu and mul: the same bits where values are multiplied, and where codes are as long
as torch was built with the kernels' exp. So for other activations. It keeps less, and compiles."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import FORMATS, are_codes_of, ops
from nn_helpers import RECIPES, assert_bits, gradients, no_gpu, on_devices, randomize, relative_error
from reference import activations as reference
from torch.utils.checkpoint import checkpoint

import qshard
from qshard import nn
from qshard.formats import info_of
from qshard.nn.parts import norms

BUDGET_S = 45
BOTH = pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
FUNCTIONS = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh"), "relu": F.relu,
             "srelu": lambda x: F.relu(x).square()}
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "sreglu": "srelu"}
ACTIVATIONS = pytest.mark.parametrize("activation", [*GATED, *FUNCTIONS])
IN_CODES = ("float8_tensorwise", "float8_blockwise")


def draw(*shape, seed, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def weights_of(fmt, joined, columns=32, inner=64, device="cpu", activation="swiglu", **kwargs):
    """gate, up (None if joined, or if it is not gated) and down, quantized."""
    assert not fmt.endswith("1x32") or columns % 32 == inner % 32 == 0
    first = [draw(inner, columns, seed=i, device=device) for i in (1, 2)]
    if activation not in GATED:
        first[1] = None
    elif joined:
        first = [torch.cat(first), None]
    plain = *first, draw(columns, inner, seed=3, device=device) / 8
    return [w if w is None else ops.quantize(w, fmt, **kwargs).requires_grad_() for w in plain]


def composed(x, gate, up, down, *biases, activation="swiglu"):
    """As swiglu_mlp."""
    gate_bias, up_bias, down_bias = biases or (None,) * 3
    if activation not in GATED:
        return ops.linear(FUNCTIONS[activation](ops.linear(x, gate, gate_bias)), down, down_bias)
    if up is None:
        first, second = ops.linear(x, gate, gate_bias).chunk(2, -1)
    else:
        first, second = ops.linear(x, gate, gate_bias), ops.linear(x, up, up_bias)
    return ops.linear(FUNCTIONS[GATED[activation]](first) * second, down, down_bias)


def fused(fmt, x, gate, up, down, *biases, **kwargs):
    return ops.swiglu_mlp(x, gate, up, down, *biases, format=fmt, down_format=fmt, **kwargs)


def step(function, x, tensors, times=1):
    """Output, and gradients of x and of all tensors, after so many backwards."""
    x = x.clone().requires_grad_()
    tensors = [t if t is None else t.detach().clone().requires_grad_() for t in tensors]
    for _ in range(times):
        y = function(x, *tensors)
        y.backward(draw(*y.shape, seed=9, device=y.device, dtype=y.dtype))
    return [y.detach(), x.grad, *(t.grad for t in tensors if t is not None)]


@pytest.mark.pairwise
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@BOTH
@pytest.mark.parametrize("bias", [False, True])
@ACTIVATIONS
def test_is_the_composition(fmt, dtype, joined, bias, activation):
    weights = weights_of(fmt, joined, activation=activation, keep_master=True)
    rows, has_up = weights[0].shape[0], weights[1] is not None
    biases = [draw(rows, seed=4), draw(64, seed=5) if has_up else None, draw(32, seed=6)]
    biases = [b if b is None else b.to(dtype) for b in biases] if bias else []
    x = draw(2, 5, 32, seed=7, dtype=dtype)
    for times in (1, 2):  # the second adds to .grad
        torch.manual_seed(0)
        got = step(partial(fused, fmt, activation=activation), x, [*weights, *biases], times)
        torch.manual_seed(0)
        expected = step(partial(composed, activation=activation), x, [*weights, *biases], times)
        # NVFP4's gradients round stochastically on devices that multiply them, not here.
        assert_bits(got, expected)


@pytest.mark.pairwise
@pytest.mark.parametrize("tokens", [0, 1, 127])
@BOTH
@ACTIVATIONS
def test_odd_inputs_give_the_same_gradients(tokens, joined, activation):
    weights = weights_of("float8_blockwise", joined, columns=96, inner=48, activation=activation)
    x = draw(tokens, 96, seed=7)
    if tokens > 1:
        x[0, 0], x[1, 1], x[2, 2] = float("inf"), float("nan"), -float("inf")
    strided = torch.empty(tokens, 192)[:, ::2].copy_(x)
    expected = step(partial(composed, activation=activation), x, weights)
    for given in (x, strided):
        got = step(partial(fused, "float8_blockwise", activation=activation), given, weights)
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu"])
def test_frozen_parts_get_no_gradients(activation):
    gate, up, down = weights_of("float8_tensorwise", False, activation=activation)
    x = draw(4, 32, seed=7)
    for trained in ("gate", "up", "down", "x", "gate down", "up x"):
        named = {"gate": gate, "up": up, "down": down, "x": x}
        named = {n: t for n, t in named.items() if t is not None}
        if not named.keys() & trained.split():
            continue
        results = []
        for function in (partial(fused, "float8_tensorwise"), composed):
            given = {n: t.detach().clone().requires_grad_(n in trained.split()) for n, t in named.items()}
            operands = given["x"], given["gate"], given.get("up"), given["down"]
            function(*operands, activation=activation).square().sum().backward()
            results.append({n: t.grad for n, t in given.items() if t.requires_grad})
            assert all(t.grad is None for t in given.values() if not t.requires_grad)
        assert_bits(*results)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_keeps_gate_and_up_alone(activation):
    weights = weights_of("float8_blockwise", False, activation=activation)
    x = draw(128, 32, seed=7).requires_grad_()
    kept = {}

    def pack(tensor):
        if not are_codes_of(tensor, *weights):
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = fused("float8_blockwise", x, *weights, activation=activation)
    assert sum(kept.values()) == x.numel() + (2 if activation in GATED else 1) * 128 * 64
    y.sum().backward()


def test_errors_name_shapes_and_formats():
    gate, up, down = weights_of("float8_blockwise", False)
    x = draw(4, 32, seed=7)
    call = {"format": "float8_blockwise", "down_format": "float8_blockwise"}
    for wrong in ((x[:, :16], gate, up, down), (x, gate, None, down), (x, gate, up, gate)):
        with pytest.raises(RuntimeError, match=r"swiglu_mlp: .* do not go together"):
            ops.swiglu_mlp(*wrong, **call)
    with pytest.raises(RuntimeError, match=r"gate is \(inner, columns\), down"):
        ops.swiglu_mlp(x, gate, None, gate, activation="gelu", **call)
    with pytest.raises(RuntimeError, match="gelu multiplies by nothing; give gate alone, up as None"):
        ops.swiglu_mlp(x, gate, up, down, activation="gelu", **call)
    for x_or_meta in (x, x.to("meta")):
        with pytest.raises(ValueError, match="swiglu_mlp: unknown activation 'tanh'; known are swiglu, geglu"):
            weights = (w.to(x_or_meta.device) for w in (gate, down))
            ops.swiglu_mlp(x_or_meta, next(weights), None, next(weights), activation="tanh", **call)
    other = ops.quantize(draw(64, 32, seed=2), "mxfp8").requires_grad_()
    with pytest.raises(RuntimeError, match="quantize both by one recipe"):
        ops.swiglu_mlp(x, gate, other, down, **call)
    y = fused("float8_blockwise", x.requires_grad_(), gate, up, down)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    empty = torch.empty(0)
    with pytest.raises(RuntimeError, match="codes of a gradient"):
        bytes = torch.empty(7, dtype=torch.uint8)
        ops.linear_backward_codes(bytes, bytes, [4, 64], x.dtype, gate, x, False, True, True)
    with pytest.raises(RuntimeError, match="gate and up must be"):
        ops.swiglu_linear_forward(x, x, down, None, False)
    halves = draw(4, 64, seed=1), draw(4, 64, seed=2)
    for maxima in (torch.zeros(1), torch.zeros(33, dtype=torch.float64), torch.zeros(1, 33)):
        with pytest.raises(RuntimeError, match=r"maxima must be \(33,\) float32"):
            ops.swiglu_linear_backward(draw(4, 32, seed=3), *halves, down, maxima, *[True] * 3, False)
    with pytest.raises(RuntimeError, match="swiglu multiplies by up, which is not given"):
        ops.swiglu_linear_forward(halves[0], None, down, None, False)
    with pytest.raises(RuntimeError, match="srelu multiplies by nothing"):
        ops.swiglu_linear_forward(*halves, down, None, False, activation="srelu")
    with pytest.raises(RuntimeError, match="joined of those of gate and up, and there is no up"):
        ops.swiglu_linear_backward(draw(4, 32, seed=3), halves[0], None, down, empty, *[True] * 4, activation="gelu")
    with pytest.raises(RuntimeError, match="does not fit"):
        ops.swiglu_linear_backward(x[:2], draw(4, 64, seed=1), draw(4, 64, seed=2), down, empty, True,
                                   True, True, False)


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("fmt", ["float8_tensorwise", "float8_blockwise", "float8_delayed", "mxfp8"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu"])
def test_the_compiled_mlp_is_the_eager_one(device, fmt, checkpointed, activation, monkeypatch):
    torch._dynamo.reset()
    # Compiled code has torch's normalization.
    monkeypatch.setattr(norms, "_takes_operator", lambda *_: False)
    module = nn.LayerNormMLP(128, 256, bias=False, normalization="RMSNorm", activation=activation,
                             device=device, params_dtype=torch.bfloat16)
    qshard.quantize_(randomize(module), RECIPES[fmt])
    other = copy.deepcopy(module)
    x = draw(160, 128, seed=7, device=device, dtype=torch.bfloat16)
    results = []
    for model, function in ((module, module), (other, torch.compile(other, fullgraph=True,
                                                                    backend="aot_eager"))):
        given = x.clone().requires_grad_()
        y = checkpoint(function, given, use_reentrant=False) if checkpointed else function(given)
        y.square().mean().backward()
        results.append([y.detach(), given.grad, gradients(model)])
    assert_bits(*results)


# ------------------------------------------------------------------------------------- in codes


@no_gpu
@pytest.mark.pairwise
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@BOTH
@pytest.mark.parametrize("tokens, columns, inner", [(1, 96, 96), (127, 4096, 4104), (4097, 96, 512)])
@ACTIVATIONS
@pytest.mark.parametrize("bias", [False, True])
def test_gpu_is_the_composition(fmt, dtype, joined, tokens, columns, inner, activation, bias):
    if fmt.endswith("1x32"):
        inner = -(-inner // 32) * 32
    weights = weights_of(fmt, joined, columns, inner, device="cuda", activation=activation)
    biases = [None if w is None else draw(w.shape[0], seed=4, device="cuda", dtype=dtype) for w in weights]
    tensors = [*weights, *biases] if bias else weights
    x = draw(tokens, columns, seed=7, device="cuda", dtype=dtype) / columns**0.5
    got = step(partial(fused, fmt, activation=activation), x, tensors)
    expected = step(partial(composed, activation=activation), x, tensors)
    # A code in 1e5 may be the next one; composed and fused NVFP4 draw other random words.
    tolerances = [0.2 if info_of(fmt).code_bits == 4 else 2e-3] * len(got)
    if fmt not in IN_CODES:
        # Where wgrad multiplies values, linear saved its input in FP8, and swiglu_mlp remakes it.
        down = 1 + sum(w is not None for w in weights)
        tolerances[down] = 0.2 if info_of(fmt).code_bits == 4 else 0.04
    for a, b, tolerance in zip(got, expected, tolerances):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert relative_error(a, b) < tolerance


@no_gpu
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt, down_fmt", [IN_CODES, IN_CODES[::-1], IN_CODES[:1] * 2, IN_CODES[1:] * 2])
@ACTIVATIONS
def test_gpu_recipes_may_differ_and_gates_be_large(fmt, down_fmt, dtype, activation):
    """Beyond 87 divisions go another way; -inf and NaN make NaN, where they do in plain torch."""
    gate, up, _ = weights_of(fmt, False, 128, 256, device="cuda", activation=activation)
    down = ops.quantize(draw(128, 256, seed=3, device="cuda") / 8, down_fmt).requires_grad_()
    x = draw(384, 128, seed=7, device="cuda", dtype=dtype)
    for row, value in enumerate((40.0, -40.0, 1e4, -1e4, float("inf"), -float("inf"), float("nan"))):
        x[3 * row, row] = value

    def mlp(x, *weights):
        return ops.swiglu_mlp(x, *weights, format=fmt, down_format=down_fmt, activation=activation)

    for rows in (slice(12), slice(None)):  # without those that are not finite, and with them
        got, expected = (step(f, x[rows], (gate, up, down)) for f in (mlp, partial(composed, activation=activation)))
        for a, b in zip(got, expected):
            assert torch.equal(a.isnan(), b.isnan())
            a, b = a.double().nan_to_num(), b.double().nan_to_num()
            assert (a - b).norm() <= 2e-3 * b.norm()


@no_gpu
@pytest.mark.parametrize("fmt", IN_CODES)
def test_gpu_codes_are_the_reference(fmt):
    """Through the operators alone, next to plain torch's formulas on the CPU."""
    m, k = 127, 384
    gate, up = (draw(m, k, seed=i, dtype=torch.bfloat16) for i in (1, 2))
    grad = draw(m, 128, seed=3, dtype=torch.bfloat16)
    down = ops.quantize(draw(128, k, seed=4), fmt)
    none = torch.empty(0, device="cuda")
    on_gpu = (grad.cuda(), gate.cuda(), up.cuda(), down.cuda(), none)
    needs = (False, True, True, False)
    values = ops.swiglu_linear_backward(*on_gpu, *needs)
    made = ops.swiglu_linear_backward(*on_gpu, *needs, fmt)
    for value, rows in ((values[1], made[1]), (values[3], made[3])):
        value, rows = value.cpu(), rows.cpu()
        if fmt == "float8_tensorwise":
            codes, _ = reference.quantize_tensorwise(value, torch.float8_e5m2)
        else:
            codes, _ = reference.quantize_1x128(value)
        different = (rows[: m * k].view(m, k) != codes.view(torch.uint8)).sum().item()
        assert different <= 1e-5 * m * k + 1


@no_gpu
@pytest.mark.parametrize("fmt", IN_CODES)
@BOTH
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_gpu_keeps_less(fmt, joined, activation):
    """Between forward and backward: codes of x, of which rows are for its next linear, gate and up."""
    m, columns, inner = 1024, 512, 1024
    weights = weights_of(fmt, joined, columns, inner, device="cuda", activation=activation)
    run = partial(fused, fmt, activation=activation)
    x = draw(m, columns, seed=7, device="cuda", dtype=torch.bfloat16).requires_grad_()
    run(x, *weights).sum().backward()  # workspaces
    hidden = x * 1  # of a graph: gate and up share its codes
    before = torch.cuda.memory_allocated()
    y = run(hidden, *weights)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    assert kept <= 2 * m * columns * 1.05 + 2 * m * inner * 2 + 8192
    y.sum().backward()
