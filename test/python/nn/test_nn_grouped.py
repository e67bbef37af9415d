"""GroupedLinear and GroupedExperts: each part of the input by a matrix of its own, equal to a Linear each."""

import io

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, fit
from nn_helpers import RECIPES, on_devices, randomize

import qshard
from qshard import nn
from qshard._runtime.classes import TensorState

ops = torch.ops.qshard
FORMATS = (None, *RECIPES)  # None: not quantized
GEMMS, IN, OUT = 4, 48, 64
SPLITS = [3, 0, 5, 2]
RECIPE = RECIPES["float8_blockwise"]


def layer_of(format, device="cpu", dtype=None, **kwargs):
    layer = nn.GroupedLinear(GEMMS, IN, OUT, device=device, params_dtype=dtype, **kwargs)
    randomize(layer)
    if format is not None:
        qshard.quantize_(layer, RECIPES[format])
    return layer


def input_of(rows=10, columns=IN, seed=1, dtype=torch.float32, device="cpu"):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype).requires_grad_()


def linears_of(layer, format):
    """A Linear for each matrix."""
    linears = []
    for i in range(GEMMS):
        linear = nn.Linear(IN, OUT, bias=layer.use_bias, params_dtype=layer.weight.dtype)
        values = {"weight": layer.state_dict()[f"weight{i}"]}
        if layer.use_bias:
            values["bias"] = layer.state_dict()[f"bias{i}"]
        linear.load_state_dict(values)
        linears.append(linear if format is None else qshard.quantize_(linear, RECIPES[format]))
    return linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_each_part_is_a_linear(format, dtype, bias):
    layer = layer_of(format, dtype=dtype, bias=bias)
    linears = linears_of(layer, format)
    x, grad = input_of(dtype=dtype), torch.randn(10, OUT).to(dtype)
    y = layer(x, SPLITS)
    y.backward(grad)
    parts = x.detach().split(SPLITS)
    for i, (linear, part, of_part) in enumerate(zip(linears, parts, grad.split(SPLITS))):
        part = part.requires_grad_()
        torch.manual_seed(0)
        expected = linear(part)
        expected.backward(of_part)
        rows = slice(sum(SPLITS[:i]), sum(SPLITS[: i + 1]))
        if not bias:
            assert_same(y[rows], expected)
        close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(y[rows], expected, **close)
        torch.testing.assert_close(x.grad[rows], part.grad, **close)
        torch.testing.assert_close(layer.weight.grad[i], linear.weight.grad, **close)
        if bias:
            torch.testing.assert_close(layer.bias.grad[i], linear.bias.grad, **close)


@pytest.mark.parametrize("format", [None, "float8_tensorwise"])
def test_splits_as_a_tensor_leave_rows(format):
    layer = layer_of(format)
    x = input_of(13)
    with torch.no_grad():
        x[10:] = float("nan")
    y = layer(x, torch.tensor(SPLITS))
    y.sum().backward()
    assert_same(y[10:], torch.zeros(3, OUT))
    assert_same(x.grad[10:], torch.zeros(3, IN))
    assert_same(y[:10], layer(x[:10], SPLITS))
    assert not y.isnan().any() and not any(p.grad.isnan().any() for p in layer.parameters())


@pytest.mark.parametrize("format", [None, "mxfp8"])
def test_inputs_of_more_dimensions_and_without_rows(format):
    layer = layer_of(format)
    x = input_of(12)
    y = layer(x.view(2, 6, IN), [4, 4, 0, 4])
    assert_same(y, layer(x, [4, 4, 0, 4]).view(2, 6, OUT))
    empty = layer(input_of(0), [0] * GEMMS)
    empty.sum().backward()
    assert empty.shape == (0, OUT) and not layer.weight.grad.any() and not layer.bias.grad.any()


@on_devices
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [None, "float8_blockwise", "nvfp4"])
def test_wgrad_goes_into_main_grad(device, format, grad_dtype):
    usual, fused = layer_of(format, device), layer_of(format, device, fuse_wgrad_accumulation=True)
    for first, kept in ((None, 2.0), (True, 0.0)):
        fused.weight.main_grad = torch.full(fused.weight.shape, 2.0, dtype=grad_dtype, device=device)
        usual.zero_grad()
        for layer in (usual, fused):
            layer(input_of(device=device), SPLITS, is_first_microbatch=first).square().sum().backward()
        assert fused.weight.grad is None
        tolerance = 1e-4 if grad_dtype == torch.float32 else 1e-2
        found, expected = fused.weight.main_grad.float(), usual.weight.grad + kept
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def test_return_bias():
    layer = layer_of("float8_blockwise", return_bias=True)
    y, bias = layer(input_of(), SPLITS)
    assert_same(bias, layer.bias)
    assert bias.data_ptr() != layer.bias.data_ptr()
    with torch.no_grad():
        whole = layer_of("float8_blockwise")
        experts = torch.repeat_interleave(torch.arange(GEMMS), torch.tensor(SPLITS))
        torch.testing.assert_close(y + bias[experts], whole(input_of(), SPLITS))


# ---------------------------------------------------------------------------------- state dicts


def te_names():
    return {f"{kind}{i}" for kind in ("weight", "bias") for i in range(GEMMS)}


@pytest.mark.parametrize("keep_master", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_state_dicts_have_the_names_of_transformer_engine(format, keep_master):
    models = [torch.nn.ModuleDict({"fc": nn.GroupedLinear(GEMMS, IN, OUT)}) for _ in range(2)]
    for seed, model in enumerate(models):
        randomize(model, seed)
        if format is not None:
            qshard.quantize_(model, RECIPES[format], keep_master=keep_master)
    state = models[0].state_dict()
    of_weight = TensorState(models[0].fc.weight.detach()).scaling_state() if format else {}
    histories = {f"fc.weight_{name}" for name in of_weight}
    assert set(state) == {f"fc.{name}" for name in te_names()} | histories
    assert state["fc.weight1"].shape == (OUT, IN) and state["fc.bias1"].shape == (OUT,)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    models[1].load_state_dict({**loaded, "fc._extra_state": None})
    x = input_of()
    with torch.no_grad():
        assert_same(models[1].fc(x, SPLITS), models[0].fc(x, SPLITS))
    if format is not None:
        # Values of codes, quantized again, may take half of a row's scale, and are the same.
        for plane in (ops.codes, ops.scale_inv) if keep_master else (ops.dequantize,):
            assert_same(plane(models[1].fc.weight.detach()), plane(models[0].fc.weight.detach()))


def test_a_load_takes_stacks_and_assigns():
    layer = layer_of("float8_blockwise")
    plain = nn.GroupedLinear(GEMMS, IN, OUT)
    stack = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for state in (stack, plain.state_dict()):
        randomize(layer)
        layer.load_state_dict(state)
        assert_same(layer.weight + 0, plain.weight)
    randomize(layer)
    layer.load_state_dict(plain.state_dict(), assign=True)
    assert qshard.is_quantized(layer.weight)
    assert_same(layer.weight + 0, plain.weight)


def test_loads_that_do_not_fit():
    layer = layer_of(None)
    state = layer.state_dict()
    del state["weight2"]
    with pytest.raises(RuntimeError, match='Missing key.*"weight"'):
        layer.load_state_dict(state)
    state = {**layer.state_dict(), "weight2": torch.zeros(OUT, IN + 1)}
    with pytest.raises(RuntimeError, match="weight0 and those that follow have different shapes"):
        layer.load_state_dict(state)


def test_dcp_asks_for_names_that_state_dicts_have():
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = torch.nn.ModuleDict({"fc": layer_of("float8_delayed")})
    state = get_model_state_dict(model)
    assert {f"fc.{name}" for name in te_names()} <= set(state)
    other = torch.nn.ModuleDict({"fc": layer_of("float8_delayed")})
    randomize(other, 3)
    set_model_state_dict(other, state)
    assert_same(other.fc.weight + 0, model.fc.weight + 0)
    assert_same(model.fc.weight3, model.fc.weight[3])
    with pytest.raises(AttributeError, match="weight4"):
        model.fc.weight4


# ------------------------------------------------------------------------------------- GroupedExperts


def experts_of(format, **kwargs):
    torch.manual_seed(0)
    experts = nn.GroupedExperts(48, 64, GEMMS, **kwargs)
    return experts if format is None else qshard.quantize_(experts, RECIPES[format])


@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_mlps(format):
    rows = fit(format, 48) if format else 48
    torch.manual_seed(0)
    experts = nn.GroupedExperts(rows, 64, GEMMS)
    randomize(experts)
    if format is not None:
        qshard.quantize_(experts, RECIPES[format])
    x = input_of(12, rows)
    with torch.no_grad():
        x[10:] = float("nan")
    y = experts(x, torch.tensor(SPLITS))
    y.sum().backward()
    assert_same(y[10:], torch.zeros(2, rows))
    begin = 0
    with torch.no_grad():
        for e, count in enumerate(SPLITS):
            part = x[begin : begin + count]
            w1, w2, w3 = (getattr(experts, name)[e] for name in ("w1", "w2", "w3"))
            expected = F.linear(F.silu(F.linear(part, w1)) * F.linear(part, w3), w2)
            torch.testing.assert_close(y[begin : begin + count], expected)
            begin += count
    for p in experts.parameters():
        assert p.grad[[0, 2, 3]].any() and not p.grad[1].any() and not p.grad.isnan().any()


def test_initial_values_and_names():
    experts = nn.GroupedExperts(48, 64, GEMMS, init_std=0.5)
    assert {n: tuple(p.shape) for n, p in experts.named_parameters()} == {
        "w1": (4, 64, 48), "w2": (4, 48, 64), "w3": (4, 64, 48),
    }  # fmt: skip
    for name, std in (("w1", 0.02), ("w2", 0.5), ("w3", 0.5)):
        assert getattr(experts, name).std().item() == pytest.approx(std, rel=0.1)
    experts.init_weights(0.1)
    assert experts.w2.std().item() == pytest.approx(0.1, rel=0.1)
    weights = []
    layer = nn.GroupedLinear(GEMMS, IN, OUT, init_method=lambda w: weights.append(w.shape))
    assert weights == [(OUT, IN)] * GEMMS and not layer.bias.any()


# ------------------------------------------------------------------------------ quantize_, compile, errors


@pytest.mark.parametrize("make", [lambda: layer_of(None), lambda: experts_of(None)], ids=["linear", "experts"])
def test_weight_only_leaves_activations(make):
    module = qshard.quantize_(make(), "nvfp4", weight_only=True)
    emulated = qshard.quantize_(make(), qshard.NVFP4BlockScaling(emulate=True))
    plain = make()
    for name, p in plain.named_parameters():
        if name in plain.weight_names:
            p.data.copy_(ops.dequantize(module.get_parameter(name).detach()))
    x = input_of(10, 48)
    counts = torch.tensor(SPLITS)
    assert_same(module(x, counts), plain(x, counts))
    assert not torch.equal(emulated(x, counts), plain(x, counts))
    assert "weight_only=True" in str(module) and "format=nvfp4" in str(module)
    qshard.dequantize_(module)
    assert "format" not in str(module)


def test_made_quantized():
    with qshard.quantized_model_init(recipe=RECIPE, keep_master=False):
        layer, experts = nn.GroupedLinear(GEMMS, IN, OUT), nn.GroupedExperts(48, 64, GEMMS)
    assert all(map(qshard.is_quantized, (layer.weight, experts.w1, experts.w2, experts.w3)))
    assert not qshard.is_quantized(layer.bias)


@pytest.mark.parametrize("format", [None, "float8_blockwise", "float8_delayed"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_fullgraph_equals_eager(kind, backend, format):
    torch._dynamo.reset()
    dtype = torch.bfloat16 if format is None else torch.float32  # torch compiles grouped_mm of bfloat16 alone
    make = (lambda: layer_of(format)) if kind == "linear" else (lambda: experts_of(format))
    eager, compiled = make().to(dtype), make().to(dtype)
    compiled.compile(fullgraph=True, backend=backend)
    found = []
    for module in (eager, compiled):
        x = input_of(10, 48, dtype=dtype)
        y = module(x, torch.tensor(SPLITS))
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(*found, **close)


@pytest.mark.parametrize(
    "error, text, call",
    [
        (ValueError, r"m_splits must be 4 numbers of rows that sum to the input's 10", lambda l: l(input_of(), [1, 2, 3, 5])),
        (ValueError, r"m_splits must be 4 numbers", lambda l: l(input_of(), [5, 5])),
        (ValueError, r"m_splits must be 4 numbers", lambda l: l(input_of(), [-1, 5, 3, 3])),
        (ValueError, r"m_splits must be 4 integers, got torch.float32", lambda l: l(input_of(), torch.ones(4))),
        (ValueError, r"m_splits must be 4 integers, got torch.int64 of shape \(3,\)",
         lambda l: l(input_of(), torch.ones(3).long())),
        (NotImplementedError, "out=", lambda l: l(input_of(), SPLITS, out=torch.empty(10, OUT))),
        (NotImplementedError, "delay_wgrad_compute=True", lambda l: nn.GroupedLinear(1, 4, 4, delay_wgrad_compute=True)),
        (NotImplementedError, "tp_size=2", lambda l: nn.GroupedLinear(1, 4, 4, tp_size=2)),
        (ValueError, "parallel_mode", lambda l: nn.GroupedLinear(1, 4, 4, parallel_mode="rows")),
    ],
)  # fmt: skip
def test_errors(error, text, call):
    with pytest.raises(error, match=text):
        call(layer_of(None))
