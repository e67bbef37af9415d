"""A normalization or an activation and the linears that it feeds, as one step each. Made of torch's
operators and the linear's; an operator that gives the linears codes instead of values replaces a step here."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qshard.nn.parts.activations import OF_OPERATOR, activate
from qshard.nn.parts.autocast import activation_dtype
from qshard.nn.parts.multiply import Multiply, are_plain, joined, multiply_parts
from qshard.nn.parts.norms import normalize

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
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """(linear(norm(x)) by each of the weights, norm(x), x). norm: what `normalize` takes after x. enter: a
    collective that norm(x) goes through on the way to the linear. needs_normed: without, norm(x) may be None, as it is
    where the operator makes its codes alone. The gradient of the x that is returned is added to the norm's as
    this is written."""
    x = x.to(activation_dtype(x))
    if enter is None and not needs_normed and _takes_norm(x, norm, multiply, weights, biases):
        *parts, x = _ops.norm_linear(
            x,
            weights=weights,
            biases=[bias for bias in biases if bias is not None] or None,
            format=multiply.weight_format,
            with_input=True,
            **_norm_arguments(norm),
        )
        return parts, None, x
    normed = normalize(x, *norm)
    input = normed if enter is None else enter(normed)
    return multiply_parts(multiply, input, weights, biases), normed, x


def _norm_arguments(norm: tuple) -> dict:
    kind, gamma, beta, eps, zero_centered_gamma = norm
    is_rms = kind == "RMSNorm"
    return {
        "norm_weight": gamma,
        "norm_bias": None if is_rms else beta,
        "eps": eps,
        "rms": is_rms,
        "zero_centered_gamma": zero_centered_gamma,
    }


def _takes_norm(x, norm, multiply, weights, biases):
    """Whether the operators make the codes of norm(x) themselves. Compiled code leaves that to them; main_grad
    has the linears' operators."""
    if not x.is_cuda or not multiply.runs_operators or multiply.weight_only or multiply.into_main_grad:
        return False
    _, gamma, beta, *_ = norm
    absent = sum(bias is None for bias in biases)
    if absent not in (0, len(biases)) or not are_plain(x, gamma, beta, *weights, *biases):
        return False
    if torch.compiler.is_compiling():
        return True
    beta = _norm_arguments(norm)["norm_bias"]
    return _ops._norm_linear_reads_codes(x, gamma, beta, weights, multiply.weight_format)


def norm_mlp(
    x: Tensor,
    norm: tuple,
    activation: str,
    params: dict | None,
    multiply: Multiply,
    first: Sequence[tuple[Tensor, Tensor | None]],
    second: tuple[Tensor, Tensor | None],
    enter: Callable | None = None,
    *,
    needs_normed: bool = True,
    adds_input: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(linear(activation(linear(norm(x)))), norm(x)) of weights and biases, where adds_input x + the former. first:
    of one weight, which for a gated activation has the rows of both halves, or of one for each half. Others: as of
    norm_linear."""
    weights, biases = zip(*first)
    if activation not in OF_OPERATOR or not multiply.runs_operators:
        parts, normed, x = norm_linear(
            x, norm, multiply, weights, biases, enter, needs_normed=needs_normed
        )
        inner = activate(joined(parts), activation, params)
        return multiply(inner, *second, residual=x if adds_input else None), normed
    x = x.to(activation_dtype(x))
    normed, more = None, {"activation": activation}
    if enter is None and not needs_normed and _takes_norm(x, norm, multiply, weights, biases):
        entered = x
        more.update(_norm_arguments(norm))
    else:
        normed = normalize(x, *norm)
        entered = normed if enter is None else enter(normed)
    adds_within = adds_input and multiply.adds_within(x, entered, *weights, second[0])
    if adds_within:
        more["residual"] = x

    def run(entered, *weights):
        *inner, down = weights
        gate, *up = zip(inner, biases)
        return swiglu_mlp(entered, multiply, gate, up[0] if up else None, (down, second[1]), **more)

    output = multiply.run(run, entered, *weights, second[0])
    return x + output if adds_input and not adds_within else output, normed


def swiglu_mlp(
    x: Tensor,
    multiply: Multiply,
    gate: tuple[Tensor, Tensor | None],
    up: tuple[Tensor, Tensor | None] | None,
    down: tuple[Tensor, Tensor | None],
    states: Sequence[list[Tensor] | None] = (None, None, None),
    **more,
) -> Tensor:
    """down(silu(gate(x)) * up(x)) of weights and biases, by the operator; up None: gate has the rows of
    both. states: of plain weights that are quantized for this use, weight_state of `qshard.ops.linear`. more: the
    operator's activation, residual and normalization."""
    up_weight, up_bias = up or (None, None)
    format = multiply.weight_format
    gate_state, up_state, down_state = states
    return _ops.swiglu_mlp(
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
        **more,
    )
