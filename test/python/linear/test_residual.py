"""What is added to a linear's output within its GEMM, and to a norm's gradient as that is written: the latter to the
bits of an addition after it, the former, too, where no GEMM adds, and else rounded once instead of twice."""

import copy

import pytest
import torch
from helpers import FORMATS, are_codes_of, ops, shares_input_codes
from nn_helpers import (
    RECIPES,
    assert_bits,
    gradients,
    no_gpu,
    on_devices,
    randomize,
    relative_error,
)
from test_norm_linear import IN_CODES, draw, every_recipe, has_fp8, operators

import qshard
from qshard import nn

B16, F32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [F32, B16, torch.float16], ids=str)


def backward(leaves, function):
    """What function(*leaves) gives, and the gradients of all leaves."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    grad = draw(*y.shape, seed=5, device=y.device, dtype=y.dtype)
    return y.detach(), torch.autograd.grad(y, leaves, grad, allow_unused=True, materialize_grads=True)


# Half a unit in the last place, relative to the value.
HALF_ULP = {B16: 2.0**-8, torch.float16: 2.0**-11, F32: 2.0**-24}


def assert_sums(actual, expected, residual):
    """expected: product + residual, both rounded. actual: the same, or the sum of what is not rounded."""
    if actual.device.type == "cpu":
        assert_bits(actual, expected)
        return
    size = (expected - residual).abs() + 2 * expected.abs() + residual.abs() / 64
    off = (actual.double() - expected.double()).abs()
    assert (off <= HALF_ULP[actual.dtype] * size.double()).all()


# ---------------------------------------------------------------------------------- the operators


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("fmt", FORMATS)
@DTYPES
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 127, 128, 0])
@pytest.mark.parametrize("features", [96, 512, 40])
def test_linear_adds_a_residual(device, fmt, dtype, biased, tokens, features):
    if features == 40 and fmt.endswith(("1x32", "1x16")):
        features = 32  # they cut no rows
    x, residual = (draw(2, tokens, n, seed=n, device=device, dtype=dtype) for n in (256, features))
    values = draw(features, 256, seed=3, device=device)
    bias = [draw(features, seed=4, device=device, dtype=dtype)] if biased else [None]
    leaves = [x, residual, *(bias if biased else [])]

    def added(x, residual, bias=None):
        return ops.linear(x, ops.quantize(values, fmt), bias, residual=residual)

    def apart(x, residual, bias=None):
        return residual + ops.linear(x, ops.quantize(values, fmt), bias)

    (got, grads), (expected, expected_grads) = (backward(leaves, f) for f in (added, apart))
    assert_sums(got, expected, residual)
    assert_bits(grads, expected_grads)


@on_devices
def test_strided_infinite_and_shared_residuals(device):
    weight = ops.quantize(draw(256, 256, seed=3, device=device), "float8_tensorwise")
    x = draw(64, 256, seed=1, device=device, dtype=B16)
    residual = draw(256, 64, seed=2, device=device, dtype=B16).t()
    residual[0, :4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    misaligned = torch.cat([residual[0, :1], residual.flatten()])[1:].view(64, 256)
    for added in (residual, misaligned, residual[:1].expand(64, 256)):
        before = added.clone()
        y, expected = ops.linear(x, weight, residual=added), added + ops.linear(x, weight)
        is_number = expected.isfinite()
        torch.testing.assert_close(y[~is_number], expected[~is_number], rtol=0, atol=0, equal_nan=True)
        assert_sums(y[is_number], expected[is_number], added[is_number])
        torch.testing.assert_close(added, before, rtol=0, atol=0, equal_nan=True)
    (itself, grads), (expected, expected_grads) = (
        backward([x], f) for f in (lambda x: ops.linear(x, weight, residual=x), lambda x: x + ops.linear(x, weight))
    )
    assert_sums(itself, expected, x)
    assert_bits(grads, expected_grads)


@on_devices
def test_residuals_that_do_not_fit(device):
    weight = ops.quantize(draw(64, 128, seed=3, device=device), "float8_tensorwise")
    x = draw(8, 128, seed=1, device=device, dtype=B16)
    for wrong in (draw(8, 128, seed=1, device=device, dtype=B16), draw(8, 64, seed=1, device=device),
                  draw(64, seed=1, device=device, dtype=B16)):
        with pytest.raises(RuntimeError, match="residual must be a plain .* tensor of shape"):
            ops.linear(x, weight, residual=wrong)


@on_devices
def test_modules_add_to_a_residual_of_another_dtype(device):
    linear = nn.Linear(64, 64, bias=False, params_dtype=B16, device=device)
    qshard.quantize_(randomize(linear), IN_CODES["tensorwise"], filter_fn=lambda *_: True)
    x, residual = draw(8, 64, seed=1, device=device, dtype=B16), draw(8, 64, seed=2, device=device)
    assert_bits(linear(x, residual=residual), residual + linear(x))


@on_devices
def test_norms_that_do_not_fit(device):
    x, gamma = draw(8, 64, seed=1, device=device), torch.ones(64, device=device)
    gate, down = (ops.quantize(draw(64, 64, seed=s, device=device), "float8_tensorwise") for s in (2, 3))
    names = {"format": "float8_tensorwise", "down_format": "float8_tensorwise"}
    for wrong in ({"norm_weight": gamma[:32]}, {"norm_weight": gamma, "norm_bias": gamma, "rms": True},
                  {"norm_bias": gamma}):
        with pytest.raises(RuntimeError, match=r"swiglu_mlp: norm_weight and norm_bias are \(64,\)"):
            ops.swiglu_mlp(x, gate, gate, down, **names, eps=1e-5, **wrong)


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("fmt", FORMATS)
@DTYPES
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", None])
@pytest.mark.parametrize("tokens", [1, 127, 256])
@pytest.mark.parametrize("adds", ["input", "other", "nothing"])
def test_the_swiglu_mlp_adds_a_residual(device, fmt, dtype, joined, kind, tokens, adds):
    """Normalized first and added last, within the operator."""
    x, other = (draw(2, tokens, 256, seed=s, device=device, dtype=dtype) for s in (1, 2))
    gamma, beta = (draw(256, seed=s, device=device) for s in (3, 4))
    rows = [256 * (2 if joined else 1)] if joined else [256, 256]
    values = [draw(n, 256, seed=n + i, device=device) / 16 for i, n in enumerate((*rows, 256))]
    names = {"format": fmt, "down_format": fmt}
    norm = {"eps": 1e-5, "rms": kind == "RMSNorm"}
    in_codes = device == "cuda" and shares_input_codes(fmt) and has_fp8(x.device)

    def weights():
        *first, down = (ops.quantize(value, fmt) for value in values)
        return first[0], None if joined else first[1], down

    def whole(x, other, gamma, beta):
        residual = {"input": x, "other": other, "nothing": None}[adds]
        more = {}
        if kind is not None:
            more = {**norm, "norm_weight": gamma, "norm_bias": None if norm["rms"] else beta}
        return ops.swiglu_mlp(x, *weights(), **names, residual=residual, **more)

    def apart(x, other, gamma, beta):
        normed = x
        if kind is not None:
            bias = None if norm["rms"] else beta
            if in_codes:
                normed = nn.parts.norms.normalize(x, kind, gamma, bias, 1e-5, False)
            else:  # by torch's operators
                options = {"normalization": kind, "eps": 1e-5, "zero_centered_gamma": False, "dtype": dtype}
                normed = nn.parts.norms._normalize(x, gamma, bias, **options)
        y = ops.swiglu_mlp(normed, *weights(), **names)
        return {"input": lambda: x + y, "other": lambda: other + y, "nothing": lambda: y}[adds]()

    (got, grads), (expected, expected_grads) = (backward([x, other, gamma, beta], f) for f in (whole, apart))
    if adds == "nothing":
        assert_bits(got, expected)
    else:
        assert_sums(got, expected, x if adds == "input" else other)
    assert_bits(grads, expected_grads)


@on_devices
@pytest.mark.parametrize("fmt", ["float8_tensorwise", "float8_blockwise"])
@pytest.mark.parametrize("tokens", [1, 127, 256])
@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_that_are_kept(device, fmt, tokens, compiled):
    """The same bits, and no codes between forward and backward."""
    x = draw(2, tokens, 256, seed=1, device=device, dtype=B16)
    leaf = ops.quantize(draw(96, 256, seed=3, device=device), fmt).requires_grad_()
    kept = []

    def pack(tensor):
        is_code = tensor.dtype == torch.uint8 and tensor.numel() > 4
        kept.extend([tensor] if is_code and not are_codes_of(tensor, leaf) else [])
        return tensor

    def run(input_is_kept):
        def function(x):
            return ops.linear(x * 1, leaf, format=fmt, input_is_kept=input_is_kept)

        leaf.grad = None
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        given = x.detach().requires_grad_()
        for _ in range(2):  # the second adds to .grad
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = function(given)
            y.backward(draw(*y.shape, seed=5, device=device, dtype=B16))
        return y.detach(), given.grad, leaf.grad

    expected = run(False)
    assert bool(kept) == (device == "cuda" and has_fp8(x.device)) or compiled
    kept.clear()
    assert_bits(run(True), expected)
    assert not kept or compiled  # there the partitioner chooses by bytes


# ------------------------------------------------------------------------------------ the modules


def layer(recipe, device, dtype=B16, **kwargs):
    options = {"num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": False,
               "attn_input_format": "bshd", "normalization": "RMSNorm", "activation": "swiglu", **kwargs}
    module = nn.TransformerLayer(256, 512, 4, params_dtype=dtype, device=device, **options)
    return qshard.quantize_(randomize(module), recipe, filter_fn=lambda *_: True)


def step(module, x, angles=None, times=1, encoder=None):
    x = x.detach().requires_grad_()
    module.zero_grad()
    for i in range(times):
        more = {} if encoder is None else {"encoder_output": encoder}
        y = module(x, rotary_pos_emb=angles, **more)
        y.backward(draw(*y.shape, seed=90 + i, device=y.device, dtype=y.dtype))
    return [y.detach(), x.grad, {name: g for name, g in gradients(module).items() if g is not None}]


def apart(monkeypatch):
    monkeypatch.setattr(nn.TransformerLayer, "_adds_as_it_is", lambda *_: False)


def assert_steps(actual, expected, bound):
    (*values, grads), (*expected_values, expected_grads) = actual, expected
    assert grads.keys() == expected_grads.keys()
    pairs = [*zip(values, expected_values), *((grads[name], expected_grads[name]) for name in grads)]
    assert max(relative_error(*pair) for pair in pairs) < bound


@pytest.mark.pairwise
@on_devices
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("options", [
    {}, {"fuse_qkv_params": True, "qkv_weight_interleaved": False}, {"activation": "gelu"},
    {"normalization": "LayerNorm", "zero_centered_gamma": True}, {"layer_type": "decoder"}, {"bias": True},
    {"output_layernorm": True}, {"apply_residual_connection_post_layernorm": True},
], ids=str)
def test_layers_that_add_within(device, format, options, monkeypatch):
    """To the same bits: on CUDA sums of 16-bit values are rounded once, those of fp32 as without GEMMs."""
    dtype = B16 if device == "cpu" else F32
    module = layer(RECIPES[format], device, dtype, **options)
    again = copy.deepcopy(module)  # with the amaxes of delayed scaling as they are
    encoder = None
    if options.get("layer_type") == "decoder":
        encoder = draw(2, 32, 256, seed=8, device=device, dtype=dtype)
    angles = nn.RotaryPositionEmbedding(64, device=device)(32)
    x = draw(2, 32, 256, seed=1, device=device, dtype=dtype)
    got = step(module, x, angles, times=2, encoder=encoder)
    apart(monkeypatch)
    expected = step(again, x, angles, times=2, encoder=encoder)
    if device == "cuda" and format == "float8_delayed":  # whose products are rounded in fp32, too
        assert_steps(got, expected, bound=0.03)
    else:
        assert_bits(got, expected)


@no_gpu
@every_recipe
def test_layers_add_within_the_kernels_cuda(recipe, monkeypatch):
    module = layer(IN_CODES[recipe], "cuda", F32)
    x = draw(2, 128, 256, seed=1, device="cuda")
    if not has_fp8(x.device):
        pytest.skip("needs a GPU with FP8 GEMMs")

    def additions():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            result = step(module, x)
        return sum("Functor_add" in event.key and event.count for event in profiler.key_averages()), result

    step(module, x)
    (inside, got), ran = additions(), operators(step, module, x)[0]
    assert "_norm_linear_forward" in ran
    apart(monkeypatch)
    outside, expected = additions()
    assert_bits(got, expected)
    assert inside <= outside - 3  # two of forward, and of backward that of the second norm at least


@on_devices
def test_dropped_hooked_and_biased_blocks_are_added_outside(device):
    x = draw(2, 32, 256, seed=1, device=device, dtype=B16)
    seen = []

    def outputs_of(module):
        handles = [part.register_forward_hook(lambda *args: seen.append(args[2]))
                   for part in (module.self_attention, module.layernorm_mlp)]
        module(x)
        for handle in handles:
            handle.remove()

    recipe = IN_CODES["tensorwise"]
    outputs_of(layer(recipe, device))
    assert all(isinstance(output, tuple) for output in seen)  # with a bias, of nothing
    module = layer(recipe, device)
    assert module._adds_as_it_is(module.self_attention, True)
    for options in ({"hidden_dropout": 0.5}, {"drop_path_rate": 0.5}, {"bias": True}):
        module = layer(recipe, device, **options)
        assert not module._adds_as_it_is(module.layernorm_mlp, True)
        if "bias" not in options:
            assert module.eval()._adds_as_it_is(module.layernorm_mlp, True)


@on_devices
@pytest.mark.parametrize("fused_qkv", [False, True])
def test_attention_keeps_no_whole_projection(device, fused_qkv):
    """Queries and keys that lie in one tensor with values are rotated to tensors of their own."""
    module = layer(IN_CODES["tensorwise"], device, fuse_qkv_params=fused_qkv, qkv_weight_interleaved=False)
    x = draw(2, 64, 256, seed=1, device=device, dtype=B16).requires_grad_()
    kept, codes = {}, []

    def pack(tensor):
        if not qshard.is_quantized(tensor) and tensor.dtype == B16:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        is_code = tensor.dtype == torch.uint8 and tensor.numel() > 64
        codes.extend([tensor] if is_code and not are_codes_of(tensor, *module.parameters()) else [])
        return tensor

    angles = nn.RotaryPositionEmbedding(64, device=device)(64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.self_attention(x, rotary_pos_emb=angles)
    projection = 2 * 64 * (256 + 2 * 128) * 2
    assert projection not in kept.values()
    assert not codes or device == "cpu"  # of what attention gives, which its backward reads itself


# ---------------------------------------------------------------------------------- compiled code


@on_devices
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@every_recipe
# On a CPU Inductor runs the same kernels as aot_eager.
@pytest.mark.only_where(lambda device, backend: device == "cuda" or backend == "aot_eager")
def test_compiled_layers_add_residuals_as_eager_ones(device, backend, recipe):
    """On CUDA the kernels of eager mode; rotary embeddings, which are not, are left out."""
    module = layer(IN_CODES[recipe], device)
    x = draw(2, 128, 256, seed=1, device=device, dtype=B16)
    eager = step(module, x)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = compiled(x)
    y.backward(draw(*y.shape, seed=90, device=device, dtype=B16))
    got = [y.detach(), x.grad, {name: g for name, g in gradients(module).items() if g is not None}]
    if device == "cuda" and has_fp8(x.device) and backend == "aot_eager":
        assert_bits(got, eager)
    else:  # Inductor gives attention other strides, and codes of what is rounded otherwise follow
        assert_steps(got, eager, bound=0.03)
