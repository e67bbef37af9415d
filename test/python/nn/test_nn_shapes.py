"""Modules of ragged and of large shapes: the bits of qshard's operators one after the other. Where CUDA's SwiGLU
quantizes in a kernel of its own, or attention's kernels have other strides to choose by, the bound is stated."""

import pytest
import torch
import torch.nn.functional as F
from helpers import fit
from nn_helpers import RECIPES, assert_bits, gradients, on_devices, randomize

import qshard
from qshard import nn
from qshard.formats import info_of
from qshard.nn.parts.activations import activate
from qshard.nn.parts.norms import normalize

TOKENS, DIMS, OUT = (1, 127, 4097), (96, 4096, 4104), 104


# Large sizes take seconds on a CPU.
small_on_cpu = pytest.mark.only_where(lambda device, tokens, dim: device == "cuda" or tokens * dim <= 1e6)


def prepared(module, format):
    return qshard.quantize_(randomize(module), RECIPES[format], filter_fn=lambda *_: True)


def input_of(*shape, dtype, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3 + 0.5
    return x.to(device, dtype).requires_grad_()


def results(function, module, x):
    module.zero_grad()
    x.grad = None
    y = function(x)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)) / 16
    y.backward(seed.to(y))
    return [y.detach(), x.grad, *gradients(module).values()]


def normed_of(module, x):
    beta = getattr(module, "layer_norm_bias", None)
    weight, zero_centered = module.layer_norm_weight, module.zero_centered_gamma
    return normalize(x, module.normalization, weight, beta, module.eps, zero_centered)


def assert_close(got, expected, bound):
    for a, b in zip(got, expected):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # With one token no gradient reaches queries and keys: both are zeros.
        assert (a.double() - b.double()).norm() <= bound * b.double().norm()


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@small_on_cpu
def test_norm_linear_of_any_shape_is_its_parts(device, format, tokens, dim, dtype, normalization):
    dim = fit(format, dim)
    module = nn.LayerNormLinear(dim, fit(format, OUT), normalization=normalization, device=device,
                                params_dtype=dtype)
    prepared(module, format)

    def one_by_one(x):
        return F.linear(normed_of(module, x), module.weight, module.bias)

    x = input_of(tokens, dim, dtype=dtype, device=device)
    assert_bits(results(module, module, x), results(one_by_one, module, x))


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@small_on_cpu
def test_mlps_of_any_shape_are_their_parts(device, format, tokens, dim, dtype, activation):
    dim = fit(format, dim)
    module = nn.LayerNormMLP(dim, fit(format, OUT), normalization="RMSNorm", activation=activation,
                             device=device, params_dtype=dtype)
    prepared(module, format)

    def one_by_one(x):
        inner = F.linear(normed_of(module, x), module.fc1_weight, module.fc1_bias)
        return F.linear(activate(inner, activation), module.fc2_weight, module.fc2_bias)

    x = input_of(tokens, dim, dtype=dtype, device=device)
    got, expected = results(module, module, x), results(one_by_one, module, x)
    if device == "cpu":
        return assert_bits(got, expected)
    # A code in 1e5 may be the next one; where wgrad multiplies values, linear saved its input in FP8, and
    # swiglu_mlp remakes it; NVFP4 draws other random words.
    is_row_scaled = info_of(format).scale.place == "rows"
    bound = 0.2 if info_of(format).code_bits == 4 else 0.05 if is_row_scaled else 2e-3
    assert_close(got, expected, bound)


def attention_by_hand(attention, x, mixed, fused):
    """What comes of `mixed`, the projected queries, keys and values."""
    heads, shape = attention.num_attention_heads, x.shape[:2]
    if fused:
        parts = mixed.view(*shape, heads, 3, -1).unbind(3)
    else:
        parts = [part.view(*shape, heads, -1) for part in mixed.chunk(3, -1)]
    return attention.proj(attention.core_attention(*parts), input_is_kept=True)


def assert_same_steps(device, format, got, expected):
    if device == "cpu":
        return assert_bits(got, expected)
    # cuBLAS and SDPA choose by strides: what differs by an ulp before it is quantized may get the next code.
    assert_close(got, expected, 0.2 if info_of(format).code_bits == 4 else 0.02)


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("input_layernorm", [False, True])
@pytest.mark.parametrize("tokens", [1, 127])
@pytest.mark.parametrize("hidden", [96, 160])
def test_attention_of_any_shape_is_its_parts(device, format, fused, input_layernorm, tokens, hidden):
    module = nn.MultiheadAttention(hidden, 4, attention_dropout=0.0, fuse_qkv_params=fused, device=device,
                                   input_layernorm=input_layernorm, params_dtype=torch.bfloat16)
    prepared(module, format)
    projection = module.layernorm_qkv if input_layernorm else module.qkv

    def one_by_one(x):
        return attention_by_hand(module, x, projection(x), fused)

    x = input_of(tokens, 2, hidden, dtype=torch.bfloat16, device=device)
    assert_same_steps(device, format, results(module, module, x), results(one_by_one, module, x))


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tokens", [1, 127])
@pytest.mark.parametrize("hidden", [96, 160])
def test_layers_of_any_shape_are_their_parts(device, format, fused, tokens, hidden):
    module = nn.TransformerLayer(hidden, fit(format, OUT), 4, hidden_dropout=0.0, attention_dropout=0.0,
                                 fuse_qkv_params=fused, activation="swiglu", device=device,
                                 params_dtype=torch.bfloat16)
    prepared(module, format)

    def one_by_one(x):
        attention = module.self_attention
        output, bias = attention_by_hand(attention, x, attention.layernorm_qkv(x), fused)
        x = x + (output + bias)
        output, bias = module.layernorm_mlp(x)
        return x + (output + bias)

    x = input_of(tokens, 2, hidden, dtype=torch.bfloat16, device=device)
    assert_same_steps(device, format, results(module, module, x), results(one_by_one, module, x))
