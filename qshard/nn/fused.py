"""A normalization or an activation and the linears that it feeds, as one step each. Made of torch's
operators and the linear's; an operator that gives the linears codes instead of values replaces a step here."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qshard.nn.activations import activate
from qshard.nn.multiply import Multiply, joined, multiply_parts
from qshard.nn.norms import normalize


def norm_linear(
    x: Tensor, norm: tuple, multiply: Multiply, weights, biases, enter: Callable | None = None
) -> tuple[list[Tensor], Tensor]:
    """(linear(norm(x)) by each of the weights, norm(x)). norm: what `normalize` takes after x. enter: what becomes of norm(x) on
    the way to the linear, a collective."""
    normed = normalize(x, *norm)
    input = normed if enter is None else enter(normed)
    return multiply_parts(multiply, input, weights, biases), normed


def activation_linear(
    x: Tensor, activation: str, params: dict | None, multiply: Multiply, weight: Tensor, bias
) -> Tensor:
    """linear(activation(x))."""
    return multiply(activate(x, activation, params), weight, bias)


def mlp(
    x: Tensor,
    activation: str,
    params: dict | None,
    multiply: Multiply,
    first: Sequence[tuple[Tensor, Tensor | None]],
    second: tuple[Tensor, Tensor | None],
) -> Tensor:
    """linear(activation(linear(x))) of weights and biases. first: of one weight, which for a gated
    activation has the rows of both halves, or of one for each half."""
    weights, biases = zip(*first)
    if activation == "swiglu" and multiply.runs_operators:
        down_bias = second[1]

        def run(x, *weights):
            *inner, down = weights
            gate, *up = zip(inner, biases)
            return swiglu_mlp(x, multiply, gate, up[0] if up else None, (down, down_bias))

        return multiply.run(run, x, *weights, second[0])
    inner = joined(multiply_parts(multiply, x, weights, biases))
    return activation_linear(inner, activation, params, multiply, *second)


def swiglu_mlp(
    x: Tensor,
    multiply: Multiply,
    gate: tuple[Tensor, Tensor | None],
    up: tuple[Tensor, Tensor | None] | None,
    down: tuple[Tensor, Tensor | None],
    states: Sequence[list[Tensor] | None] = (None, None, None),
) -> Tensor:
    """down(silu(gate(x)) * up(x)) of weights and biases, by the operator; up None: gate has the rows of
    both. states: of plain weights that are quantized for this use, weight_state of `qshard.ops.linear`."""
    up_weight, up_bias = up or (None, None)
    format = multiply.weight_format
    gate_state, up_state, down_state = states
    return torch.ops.qshard.swiglu_mlp(
        x,
        gate[0],
        up_weight,
        down[0],
        gate[1],
        up_bias,
        down[1],
        weight_only=multiply.weight_only,
        format=format,
        down_format=format,
        gate_state=gate_state,
        up_state=up_state,
        down_state=down_state,
    )
