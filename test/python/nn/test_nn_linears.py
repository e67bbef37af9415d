"""LayerNorm, RMSNorm, LayerNormLinear, LayerNormMLP and the arguments of Linear: equal to the same
operators one by one, and close to TransformerEngine's formulas in float64."""

import pytest
import torch
import torch.nn.functional as F
from helpers import fit
from nn_helpers import RECIPES, assert_bits, doubles, gradients, on_devices, randomize
from reference import transformer as reference
from torch.utils._pytree import tree_leaves

import qshard
from qshard import nn
from qshard.formats import info_of
from qshard.nn.parts.activations import OF_OPERATOR, _activate, activate
from qshard.nn.parts.norms import normalize

ops = torch.ops.qshard
FORMATS = (None, *RECIPES)  # None: not quantized
NORMS = ("LayerNorm", "RMSNorm")


def prepared(module, format, **kwargs):
    randomize(module)
    if format is not None:
        qshard.quantize_(module, RECIPES[format], filter_fn=lambda *_: True, **kwargs)
    return module


def input_of(*shape, dtype=torch.float32, device="cpu", seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 3 + 0.5
    return x.to(device, dtype).requires_grad_()


def plain_norm(module, x, prefix="layer_norm_"):
    weight, bias = getattr(module, f"{prefix}weight"), getattr(module, f"{prefix}bias", None)
    if x.is_cuda:  # by kernels with sums of their own (test_normalization.py)
        return normalize(x, module.normalization, weight, bias, module.eps, False)
    if module.normalization == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, module.eps)
    return F.layer_norm(x, weight.shape, weight, bias, module.eps)


def run(function, module, x, inputs=()):
    """(outputs, gradients of the module, of the input)."""
    for tensor in (*module.parameters(), x):
        tensor.grad = None
    outputs = function(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.ones_like(o) * (i + 1) for i, o in enumerate(outputs)])
    return [o.detach() for o in outputs], gradients(module), x.grad


# ------------------------------------------------------------------- LayerNorm and RMSNorm


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 96), (127, 104), (3, 5, 96), (0, 96)], ids=str)
def test_norms_are_the_formulas(device, kind, zero_centered_gamma, dtype, shape):
    module = getattr(nn, kind)(
        shape[-1], eps=1e-3, zero_centered_gamma=zero_centered_gamma, dtype=dtype, device=device
    )
    assert all((p == 0).all() if zero_centered_gamma or n == "bias" else (p == 1).all()
               for n, p in module.named_parameters())
    randomize(module)
    x = input_of(*shape, dtype=dtype, device=device)
    y = module(x)
    y.backward(torch.ones_like(y))
    values = {name: value.requires_grad_() for name, value in doubles(module).items()}
    plain_x = x.detach().double().cpu().requires_grad_()
    expected = reference.norm(
        kind, plain_x, values["weight"], values.get("bias"), 1e-3, zero_centered_gamma
    )
    expected.sum().backward()
    assert y.dtype == dtype and y.shape == x.shape
    # One rounding of the result: of what is computed in fp32.
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(y.cpu().double(), expected, **tolerance)
    loose = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 40 * torch.finfo(dtype).eps}
    torch.testing.assert_close(x.grad.cpu().double(), plain_x.grad, **loose)
    for name, parameter in module.named_parameters():
        scale = max(1, shape[0]) * torch.finfo(dtype).eps * 10
        torch.testing.assert_close(parameter.grad.cpu().double(), values[name].grad, rtol=0.02,
                                   atol=scale)


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_several_dimensions(kind):
    module = randomize(getattr(nn, kind)((4, 6)))
    x = input_of(5, 4, 6)
    y = module(x)
    flat = getattr(nn, kind)(24)
    flat.load_state_dict({name: value.flatten() for name, value in module.state_dict().items()})
    torch.testing.assert_close(y.flatten(1), flat(x.flatten(1)))
    with pytest.raises(ValueError, match=r"input of shape \(5, 6, 4\) does not end"):
        module(x.transpose(1, 2))


def test_norms_take_the_deprecated_arguments():
    with pytest.warns(DeprecationWarning, match="hidden_size"):
        module = nn.RMSNorm(hidden_size=8, params_dtype=torch.bfloat16, sequence_parallel=True)
    assert module.weight.dtype == torch.bfloat16 and module.weight.sequence_parallel
    for arguments in ({}, {"normalized_shape": 8, "hidden_size": 8}):
        with pytest.raises(ValueError, match="normalized_shape"):
            nn.LayerNorm(**arguments)
    with pytest.raises(ValueError, match="give one"):
        nn.LayerNorm(8, params_dtype=torch.float32, dtype=torch.float32)


def test_norms_under_autocast_and_of_other_dtypes():
    module = randomize(nn.LayerNorm(16))
    x = input_of(3, 16, dtype=torch.bfloat16)
    assert module(x).dtype == torch.float32  # the parameters'
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x.float())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, module(x).bfloat16())


def test_l2_normalization_divides_by_the_norm():
    x = input_of(3, 5, 16, dtype=torch.bfloat16)
    y = nn.L2Normalization(eps=1e-2)(x)
    wide = x.detach().double()
    expected = wide / (wide.square().sum(-1, keepdim=True) + 1e-2).sqrt()
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=0)


# ------------------------------------------------------------------------- LayerNormLinear


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("normalization,bias,dtype", [
    ("LayerNorm", True, torch.float32), ("RMSNorm", False, torch.float32),
    ("LayerNorm", False, torch.bfloat16), ("RMSNorm", True, torch.bfloat16)])
@pytest.mark.parametrize("shape", [(1, 96), (127, 104), (2, 3, 96), (0, 104)], ids=str)
@pytest.mark.parametrize("returns", [(), ("return_bias",), ("return_layernorm_output",),
                                     ("return_bias", "return_layernorm_output")], ids=str)
@pytest.mark.parametrize("parts", [None, ("a", "b_", "c"), {"a": 32, "b": 64}], ids=str)
def test_layer_norm_linear(device, format, normalization, bias, dtype, shape, returns, parts):
    """Bits of the norm followed by linears."""
    module = prepared(
        nn.LayerNormLinear(shape[-1], 96, normalization=normalization, bias=bias, parameters_split=parts,
                           params_dtype=dtype, device=device, **dict.fromkeys(returns, True)),
        format,
    )
    prefixes = ("",) if parts is None else ("a_", "b_", "c_")[: len(parts)]

    def one_by_one(x):
        normed = plain_norm(module, x)
        biases = [getattr(module, f"{prefix}bias") for prefix in prefixes]
        added = [None] * len(prefixes) if module.return_bias else biases
        outputs = [
            F.linear(normed, getattr(module, f"{prefix}weight"), b)
            for prefix, b in zip(prefixes, added)
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        result = [output]
        if "return_bias" in returns:
            result.append(torch.cat(biases) if bias else torch.empty(0, dtype=dtype, device=device))
        if "return_layernorm_output" in returns:
            result.append(normed)
        return tuple(result) if len(result) > 1 else output

    x = input_of(*shape, dtype=dtype, device=device)
    if not bias and "return_bias" in returns:  # an empty tensor has no graph
        with torch.no_grad():
            return assert_bits(module(x), one_by_one(x))
    assert_bits(run(module, module, x), run(one_by_one, module, x))


def test_parameters_split_is_one_linear():
    """Not quantized, parts compute what the whole does."""
    whole = randomize(nn.LayerNormLinear(32, 48))
    parts = nn.LayerNormLinear(32, 48, parameters_split={"q": 16, "kv": 32})
    names = {"q_weight": whole.weight[:16], "kv_weight": whole.weight[16:],
             "q_bias": whole.bias[:16], "kv_bias": whole.bias[16:]}
    parts.load_state_dict({"layer_norm_weight": whole.layer_norm_weight,
                           "layer_norm_bias": whole.layer_norm_bias, **names})
    x = input_of(5, 32)
    torch.testing.assert_close(parts(x), whole(x))
    for given, error in (((), "names no parameter"), ({"q": 3}, "does not sum"),
                         (("a",) * 5, "does not sum")):
        with pytest.raises(ValueError, match=error):
            nn.LayerNormLinear(32, 48, parameters_split=given)
    with pytest.raises(TypeError, match="takes names"):
        nn.Linear(32, 48, parameters_split=[1, 2])


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("format", [None, "float8_blockwise", "nvfp4"])
def test_layer_norm_linear_is_the_formula(normalization, zero_centered_gamma, format):
    module = prepared(
        nn.LayerNormLinear(96, 104, normalization=normalization, eps=1e-2,
                           zero_centered_gamma=zero_centered_gamma, return_layernorm_output=True),
        format, weight_only=True,
    )
    x = input_of(127, 96)
    y, normed = module(x)
    p = doubles(module)
    expected = reference.norm(normalization, x.detach().double(), p["layer_norm_weight"],
                              p.get("layer_norm_bias"), 1e-2, zero_centered_gamma)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.double(), expected @ p["weight"].t() + p["bias"], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------- LayerNormMLP


def is_row_scaled(format):
    return format is not None and info_of(format).scale.place == "rows"


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("tokens", [(1,), (127,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_mlp(device, format, activation, tokens, recompute, dtype):
    """Bits of the operators one by one."""
    module = prepared(
        nn.LayerNormMLP(96, fit(format or "", 104), activation=activation, normalization="RMSNorm",
                        params_dtype=dtype, device=device, checkpoint=recompute,
                        return_layernorm_output=True),
        format,
    )

    def one_by_one(x):
        normed = plain_norm(module, x)
        inner = activate(F.linear(normed, module.fc1_weight, module.fc1_bias), activation)
        return F.linear(inner, module.fc2_weight, module.fc2_bias), normed

    x = input_of(*tokens, 96, dtype=dtype, device=device)
    actual, expected = run(module, module, x), run(one_by_one, module, x)
    if device == "cuda" and activation in OF_OPERATOR and is_row_scaled(format):
        # Where wgrad multiplies values, linear has saved its input in FP8; swiglu_mlp remakes it.
        exact, coarse = (result[1].pop("fc2_weight") for result in (actual, expected))
        assert (exact - coarse).norm() <= 0.05 * coarse.norm()
    if device == "cuda" and activation in ("gelu", "geglu"):
        # torch's GELU is up to 1e-6 off the formula, which our kernel computes: a code may be a neighbour.
        assert_near(actual, expected)
    else:
        assert_bits(actual, expected)


def assert_near(actual, expected):
    """Results and gradients differ by a hundredth of their norm at most."""
    for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a - b).float().norm() <= 1e-2 * b.float().norm()


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_the_formulas(activation, dtype):
    params = {"limit": 2.0, "alpha": 1.5, "glu_linear_offset": 0.25}
    params = params if activation == "clamped_swiglu" else {}
    x = input_of(127, 104, dtype=dtype)
    plain_x = x.detach().double().requires_grad_()
    y, expected = activate(x, activation, params), reference.activation(activation, plain_x, **params)
    eps = torch.finfo(dtype).eps
    # Where tanh is close to -1, to eps of the factors, which are up to 12.
    torch.testing.assert_close(y.double(), expected, rtol=4 * eps, atol=32 * eps)
    y.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad.double(), plain_x.grad, rtol=8 * eps, atol=64 * eps)


def kept_by(function, x):
    """Bytes that forward keeps for backward, beside x."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        function(x)
    kept.pop(x.untyped_storage().data_ptr(), None)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_keep_their_input_alone(activation):
    """And give the bits of what they are made of; second derivatives are there."""
    x = input_of(127, 104, dtype=torch.bfloat16)
    assert kept_by(lambda t: activate(t, activation), x) == 0
    results = []
    for function in (activate, _activate):
        y = function(x, activation, None)
        results.append((y, torch.autograd.grad(y.square().sum(), x)))
    assert_bits(results[0], results[1])
    seconds = []
    wide = x.detach()[:5].double().requires_grad_()
    for function in (activate, _activate):
        y = function(wide, activation, None)
        (first,) = torch.autograd.grad(y.square().sum(), wide, create_graph=True)
        seconds.append(torch.autograd.grad(first.sum(), wide))
    torch.testing.assert_close(*seconds)
    batched = torch.func.vmap(lambda t: activate(t, activation))(x.detach())
    assert_bits(batched, activate(x.detach(), activation))


@pytest.mark.parametrize("kind", NORMS)
def test_norms_in_fp32_keep_their_input_alone(kind):
    module = getattr(nn, kind)(104, zero_centered_gamma=True, dtype=torch.bfloat16)
    x = input_of(127, 104, dtype=torch.bfloat16)
    assert kept_by(module, x) <= 2 * 104 * 2  # the parameters
    module.weight.requires_grad_(False)
    module(x).sum().backward()
    assert module.weight.grad is None and x.grad.abs().sum() > 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "clamped_swiglu"])
def test_layer_norm_mlp_is_the_formula(activation, normalization, bias):
    params = {"limit": 0.5} if activation == "clamped_swiglu" else None
    module = randomize(
        nn.LayerNormMLP(96, 104, activation=activation, normalization=normalization, bias=bias,
                        activation_params=params, zero_centered_gamma=True, return_bias=True)
    )
    x = input_of(127, 96)
    y, fc2_bias = module(x)
    p = doubles(module)
    normed = reference.norm(normalization, x.detach().double(), p["layer_norm_weight"],
                            p.get("layer_norm_bias"), module.eps, True)
    inner = normed @ p["fc1_weight"].t() + p.get("fc1_bias", 0)
    expected = reference.activation(activation, inner, **(params or {})) @ p["fc2_weight"].t()
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(fc2_bias, module.fc2_bias if bias else torch.empty(0))


def test_checkpoint_keeps_less():
    def saved(checkpoint):
        module = nn.LayerNormMLP(96, 256, checkpoint=checkpoint)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            module(input_of(64, 96))
        parameters = {p.data_ptr() for p in module.parameters()}
        return sum(t.numel() for t in kept if t.data_ptr() not in parameters)

    # checkpoint's own hooks stand above ours: they see the input, which it keeps.
    assert saved(True) <= 64 * 96 < saved(False)


@pytest.mark.parametrize("format", [None, "float8_blockwise"])
def test_checkpoint_under_transforms(format):
    module = prepared(nn.LayerNormMLP(96, 104, checkpoint=True, activation="swiglu"), format)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = input_of(7, 96)

    def loss(parameters, x):
        return torch.func.functional_call(module, parameters, x).square().mean()

    grads, x_grad = torch.func.grad(loss, (0, 1))(parameters, x.detach())
    loss({}, x).backward()
    torch.testing.assert_close(x_grad, x.grad)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


# ------------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("format", [None, "float8_tensorwise"])
@pytest.mark.parametrize("make", [lambda: nn.LayerNormLinear(32, 48, return_layernorm_output=True),
                                  lambda: nn.LayerNormMLP(32, 48, return_layernorm_output=True)])
def test_autocast_gives_bf16_outputs_and_fp32_gradients(make, format):
    module = prepared(make(), format)
    x = input_of(5, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = module(x)
    assert [o.dtype for o in outputs] == [torch.bfloat16] * 2
    with torch.no_grad():
        expected = module(x)
    for o, e in zip(outputs, expected):
        torch.testing.assert_close(o.float(), e, rtol=0.05, atol=0.05)
    sum(o.float().sum() for o in outputs).backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())
