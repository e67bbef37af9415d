"""Linears of one normalization, which nothing else reads, as one step, where nothing stands between them."""

from collections.abc import Sequence

from torch import Tensor

from qshard.nn.fused import norm_linear, norm_mlp
from qshard.nn.linear import Linear
from qshard.nn.multiply import Multiply, are_plain
from qshard.nn.swiglu import multiply_of


def linears_of_norm(x: Tensor, norm: tuple, linears: Sequence[Linear]) -> list[Tensor] | None:
    """linear(norm(x)) of each, or None where each has to run by itself: as of swiglu_of_linears, and where their
    operators do not take a norm: weights quantized for each use, cut over ranks, or used alone. norm: what
    `normalize` takes after x."""
    multiply = _multiply_of(linears)
    if multiply is None:
        return None
    weights, biases = [l.weight for l in linears], [l.bias for l in linears]
    outputs, _, _ = norm_linear(x, norm, multiply, weights, biases, needs_normed=False)
    return outputs


def swiglu_of_norm(x: Tensor, norm: tuple, gate: Linear, up: Linear, down: Linear) -> Tensor | None:
    """down(silu(gate(norm(x))) * up(norm(x))), or None, as of linears_of_norm."""
    multiply = _multiply_of((gate, up, down))
    if multiply is None:
        return None
    first, second = [(l.weight, l.bias) for l in (gate, up)], (down.weight, down.bias)
    output, _ = norm_mlp(x, norm, "swiglu", None, multiply, first, second, needs_normed=False)
    return output


def _multiply_of(linears) -> Multiply | None:
    multiply = multiply_of(linears)
    if multiply is None or multiply.weight_only:
        return None
    if any(linear.dynamic is not None or linear.style is not None for linear in linears):
        return None
    is_plain = all(are_plain(linear.weight, linear.bias) for linear in linears)
    return multiply if is_plain else None
