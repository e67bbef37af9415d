"""A normalization or an activation and the linears that it feeds, as one step each. Made of torch's
operators and the linear's; an operator that gives the linears codes instead of values replaces a step here."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from qshard.nn.activations import activate
from qshard.nn.autocast import activation_dtype
from qshard.nn.multiply import Multiply, joined, multiply_parts
from qshard.nn.norms import normalize

_ops = torch.ops.qshard


def norm_linear(
    x: Tensor,
    norm: tuple,
    multiply: Multiply,
    weights,
    biases,
    enter: Callable | None = None,
    *,
    needs_normed: bool = True,
) -> tuple[list[Tensor], Tensor | None]:
    """(linear(norm(x)) by each of the weights, norm(x)). norm: what `normalize` takes after x. enter: what
    becomes of norm(x) on the way to the linear, a collective. needs_normed: without, norm(x) may be None, as it is
    where the operator makes its codes alone."""
    x = x.to(activation_dtype(x))
    if enter is None and not needs_normed and multiply.runs_operators:
        parts = _norm_linear_in_codes(x, norm, multiply, weights, biases)
        if parts is not None:
            return parts, None
    normed = normalize(x, *norm)
    input = normed if enter is None else enter(normed)
    return multiply_parts(multiply, input, weights, biases), normed


def _norm_linear_in_codes(x, norm, multiply, weights, biases):
    """By the operator, of the same bits; None of what it does not take in codes. Compiled code has torch's
    normalization, and main_grad the linear's operators."""
    if not x.is_cuda or multiply.weight_only or multiply.into_main_grad or torch.compiler.is_compiling():
        return None
    kind, gamma, beta, eps, zero_centered_gamma = norm
    biases = [bias for bias in biases if bias is not None]
    plain = (x, gamma, *([] if beta is None else [beta]), *weights, *biases)
    if len(biases) not in (0, len(weights)) or any(type(t) not in (Tensor, Parameter) for t in plain):
        return None
    is_rms = kind == "RMSNorm"
    beta = None if is_rms else beta
    if not _ops._norm_linear_reads_codes(x, gamma, beta, weights):
        return None
    return _ops.norm_linear(
        x,
        gamma,
        beta,
        weights,
        biases or None,
        eps=eps,
        rms=is_rms,
        zero_centered_gamma=zero_centered_gamma,
        format=multiply.weight_format,
    )


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
