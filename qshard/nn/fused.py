"""A normalization or an activation and the linears that it feeds, as one step each. Made of torch's
operators and the linear's; a kernel that gives the linears codes instead of values replaces a step here."""

from collections.abc import Callable

from torch import Tensor

from qshard.nn.activations import activate
from qshard.nn.multiply import Multiply, multiply_parts
from qshard.nn.norms import normalize


def norm_linear(
    x: Tensor, norm: tuple, multiply: Multiply, weights, biases, enter: Callable | None = None
) -> tuple[Tensor, Tensor]:
    """(linear(norm(x)), norm(x)). norm: what `normalize` takes after x. enter: what becomes of norm(x) on
    the way to the linear, a collective."""
    normed = normalize(x, *norm)
    input = normed if enter is None else enter(normed)
    return multiply_parts(multiply, input, weights, biases), normed


def activation_linear(
    x: Tensor, activation: str, params: dict | None, multiply: Multiply, weight: Tensor, bias
) -> Tensor:
    """linear(activation(x))."""
    return multiply(activate(x, activation, params), weight, bias)
