"""Activations of an MLP, by TransformerEngine's formulas. Those named with "glu" split their input into
two halves along the last dimension and multiply f(first) by the second."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qshard.nn.parts.recompute import recomputed


def _gelu(x):
    return F.gelu(x, approximate="tanh")


def _qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def _srelu(x):
    return F.relu(x).square()


_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "qgelu": _qgelu,
    "relu": F.relu,
    "srelu": _srelu,
    "silu": F.silu,
}
_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": _gelu,
    "glu": torch.sigmoid,
    "qgeglu": _qgelu,
    "reglu": F.relu,
    "sreglu": _srelu,
    "swiglu": F.silu,
}
CLAMPED = "clamped_swiglu"
# What `qshard.ops.swiglu_mlp` computes between its linears, in codes where GEMMs read them.
OF_OPERATOR = frozenset({"gelu", "relu", "srelu", "silu", "geglu", "reglu", "sreglu", "swiglu"})
ACTIVATIONS = (*_POINTWISE, *_GATED, CLAMPED)
_CLAMPED_DEFAULTS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


def is_gated(activation: str) -> bool:
    """Whether it halves the last dimension."""
    return activation in _GATED or activation == CLAMPED


def check_params(module: str, activation: str, params: dict | None) -> None:
    unknown = set(params or ()) - (set(_CLAMPED_DEFAULTS) if activation == CLAMPED else set())
    if unknown:
        raise ValueError(
            f"qshard.nn.{module}: activation_params has {', '.join(sorted(unknown))}; {activation!r} "
            f"takes {', '.join(_CLAMPED_DEFAULTS) if activation == CLAMPED else 'none'}"
        )


def activate(x: Tensor, activation: str, params: dict | None = None) -> Tensor:
    """(..., features), or (..., features / 2) of a gated one, in the dtype of x, which is all that is
    kept for backward."""
    return recomputed(functools.partial(_activate, activation=activation, params=params), x)


def _activate(x, activation, params):
    if activation in _POINTWISE:
        return _POINTWISE[activation](x)
    gate, linear = x.chunk(2, -1)
    if activation in _GATED:
        return _GATED[activation](gate) * linear
    limit, alpha, offset = {**_CLAMPED_DEFAULTS, **(params or {})}.values()
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + offset)


def gate(first: Tensor, second: Tensor, activation: str) -> Tensor:
    """f(first) * second of a gated activation with two inputs, which are all that is kept."""
    return recomputed(functools.partial(_gate, activation=activation), first, second)


def _gate(first, second, activation):
    return _GATED[activation](first) * second
