"""Normalizations, activations, rotary embedding and attention, by the formulas that TransformerEngine
documents: written out, in the dtype of what they are given (float64 in the tests)."""

import math

import torch


def layer_norm(x, weight, bias, eps, zero_centered_gamma=False):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    gamma = 1 + weight if zero_centered_gamma else weight
    return (x - mean) / (variance + eps) ** 0.5 * gamma + bias


def rms_norm(x, weight, eps, zero_centered_gamma=False):
    gamma = 1 + weight if zero_centered_gamma else weight
    return x / ((x**2).mean(-1, keepdim=True) + eps) ** 0.5 * gamma


def norm(kind, x, weight, bias, eps, zero_centered_gamma=False):
    if kind == "RMSNorm":
        return rms_norm(x, weight, eps, zero_centered_gamma)
    return layer_norm(x, weight, bias, eps, zero_centered_gamma)


def _sigmoid(x):
    return 1 / (1 + (-x).exp())


def _gelu(x):
    """The tanh form."""
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def _relu(x):
    return torch.where(x > 0, x, 0)


POINTWISE = {
    "gelu": _gelu,
    "qgelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": _relu,
    "srelu": lambda x: _relu(x) ** 2,
    "silu": lambda x: x * _sigmoid(x),
}
GATES = {
    "glu": _sigmoid,
    "geglu": POINTWISE["gelu"],
    "qgeglu": POINTWISE["qgelu"],
    "reglu": POINTWISE["relu"],
    "sreglu": POINTWISE["srelu"],
    "swiglu": POINTWISE["silu"],
}
ACTIVATIONS = (*POINTWISE, *GATES, "clamped_swiglu")


def activation(name, x, limit=7.0, alpha=1.702, glu_linear_offset=1.0):
    if name in POINTWISE:
        return POINTWISE[name](x)
    half = x.shape[-1] // 2
    gate, linear = x[..., :half], x[..., half:]
    if name in GATES:
        return GATES[name](gate) * linear
    gate = gate.clamp(max=limit)
    linear = linear.clamp(-limit, limit)
    return gate * _sigmoid(alpha * gate) * (linear + glu_linear_offset)


def rotary(x, angles, interleaved):
    """x: (positions, batch, heads, channels); angles: (positions, channels or fewer)."""
    out = x.clone()
    rotated = angles.shape[-1]
    for c in range(rotated):
        if interleaved:
            partner, sign = (c + 1, -1) if c % 2 == 0 else (c - 1, 1)
        else:
            half = rotated // 2
            partner, sign = (c + half, -1) if c < half else (c - half, 1)
        angle = angles[: x.shape[0], c].view(-1, 1, 1)
        out[..., c] = x[..., c] * angle.cos() + sign * x[..., partner] * angle.sin()
    return out


def attends(i, j, queries, keys, window, bottom_right):
    """Whether query i of `queries` sees key j of `keys`: within the window around the diagonal."""
    left, right = window
    at = i + keys - queries if bottom_right else i
    return (left < 0 or j >= at - left) and (right < 0 or j <= at + right)


def attention(
    query, key, value, allowed, scale, softcap=0.0, bias=None, pre_scale=False, sink=None
):
    """query: (batch, heads, queries, channels); key, value with as many heads or a divisor of them.
    allowed: bool (batch, heads, queries, keys). sink: (heads,) scores beside the keys'. Zeros where
    nothing is allowed."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("bhqc,bhkc->bhqk", query, key)
    if pre_scale:
        scores = scores + bias
    scores = scores * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None and not pre_scale:
        scores = scores + bias
    weights = torch.where(allowed, scores.exp(), 0)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.exp().view(1, -1, 1, 1)
    weights = torch.where(total > 0, weights / total, 0)
    return torch.einsum("bhqk,bhkc->bhqc", weights, value)


def _bias(p, name):
    return p.get(name, 0)


def split_rows(p, prefix, parts):
    """The weight and bias of a projection that is one parameter or parts of it."""
    if f"{prefix}weight" in p:
        return p[f"{prefix}weight"], _bias(p, f"{prefix}bias")
    weight = torch.cat([p[f"{prefix}{part}_weight"] for part in parts])
    biases = [p[f"{prefix}{part}_bias"] for part in parts if f"{prefix}{part}_bias" in p]
    return weight, torch.cat(biases) if biases else 0


def multihead_attention(
    p, prefix, x, allowed, heads, groups, *, kind="LayerNorm", eps=1e-5, zero_centered=False,
    interleaved_weight=False, encoder_output=None, angles=None, interleaved_pairs=False,
    qk_norm=None, qk_norm_first=False, softcap=0.0
):
    """(output before the bias, bias, normalized input or None) of (length, batch, hidden) inputs; p:
    parameters by name, those of this module with `prefix`."""
    cross = encoder_output is not None
    first = "layernorm_query." if cross else "layernorm_qkv."
    normed = None
    if f"{prefix}{first}layer_norm_weight" in p:
        at = f"{prefix}{first}layer_norm_"
        normed = norm(kind, x, p[f"{at}weight"], p.get(f"{at}bias"), eps, zero_centered)
    else:
        first = "query_layer." if cross else "qkv."
    source = x if normed is None else normed
    parts = ("query",) if cross else ("query", "key", "value")
    weight, bias = split_rows(p, prefix + first, parts)
    channels = weight.shape[0] // (heads if cross else heads + 2 * groups)
    mixed = source @ weight.t() + bias
    front = mixed.shape[:-1]
    if cross:
        query = mixed.view(*front, heads, channels)
        weight, bias = split_rows(p, f"{prefix}key_value.", ("key", "value"))
        both = encoder_output @ weight.t() + bias
        sizes = (groups, 2, channels) if interleaved_weight else (2, groups, channels)
        both = both.view(*both.shape[:-1], *sizes)
        key, value = both.unbind(-2 if interleaved_weight else -3)
    elif interleaved_weight:
        mixed = mixed.view(*front, groups, heads // groups + 2, channels)
        query = mixed[..., :-2, :].reshape(*front, heads, channels)
        key, value = mixed[..., -2, :], mixed[..., -1, :]
    else:
        mixed = mixed.view(*front, heads + 2 * groups, channels)
        query, key, value = mixed.split([heads, groups, groups], -2)

    def normalized(t, name):
        if qk_norm == "L2Normalization":
            return t / (t.square().sum(-1, keepdim=True) + 1e-6) ** 0.5
        at = f"{prefix}{name}."
        return norm(qk_norm, t, p[f"{at}weight"], p.get(f"{at}bias"), 1e-6)

    if qk_norm and qk_norm_first:
        query, key = normalized(query, "q_norm"), normalized(key, "k_norm")
    if angles is not None:
        query, key = (rotary(t, angles, interleaved_pairs) for t in (query, key))
    if qk_norm and not qk_norm_first:
        query, key = normalized(query, "q_norm"), normalized(key, "k_norm")
    query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    context = attention(query, key, value, allowed, channels**-0.5, softcap)
    context = context.permute(2, 0, 1, 3).flatten(2)
    return context @ p[f"{prefix}proj.weight"].t(), _bias(p, f"{prefix}proj.bias"), normed


def layer_norm_mlp(p, prefix, x, activation_name, *, kind="LayerNorm", eps=1e-5, zero_centered=False):
    """(output before the bias, bias, normalized input)."""
    at = f"{prefix}layer_norm_"
    normed = norm(kind, x, p[f"{at}weight"], p.get(f"{at}bias"), eps, zero_centered)
    inner = normed @ p[f"{prefix}fc1_weight"].t() + _bias(p, f"{prefix}fc1_bias")
    inner = activation(activation_name, inner)
    return inner @ p[f"{prefix}fc2_weight"].t(), _bias(p, f"{prefix}fc2_bias"), normed


def transformer_layer(
    p, x, allowed, heads, groups, *, activation_name="gelu", normed_residual=False,
    output_norm=False, parallel=False, encoder_output=None, cross_allowed=None, **options
):
    """Without dropout. `options`: of multihead_attention."""
    norms = {name: options[name] for name in ("kind", "eps", "zero_centered") if name in options}
    output, bias, normed = multihead_attention(
        p, "self_attention.", x, allowed, heads, groups, **options
    )
    if parallel:
        mlp, mlp_bias, _ = layer_norm_mlp(p, "layernorm_mlp.", x, activation_name, **norms)
        return x + output + bias + mlp + mlp_bias
    x = (normed if normed_residual and not output_norm else x) + output + bias
    if encoder_output is not None:
        output, bias, normed = multihead_attention(
            p, "inter_attention.", x, cross_allowed, heads, groups, encoder_output=encoder_output,
            **options,
        )
        x = (normed if normed_residual else x) + output + bias
    mlp, bias, normed = layer_norm_mlp(p, "layernorm_mlp.", x, activation_name, **norms)
    x = (normed if normed_residual else x) + mlp + bias
    if output_norm:
        kind = norms.pop("kind", "LayerNorm")
        eps, zero_centered = norms.get("eps", 1e-5), norms.get("zero_centered", False)
        x = norm(kind, x, p["layernorm.weight"], p.get("layernorm.bias"), eps, zero_centered)
    return x
