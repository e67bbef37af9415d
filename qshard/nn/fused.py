"""A normalization or an activation and the linears that it feeds, as one step each. Made of torch's
operators and the linear's; a kernel that gives the linears codes instead of values replaces a step here."""

from torch import Tensor

from qshard.nn.activations import activate
from qshard.nn.multiply import Multiply, multiply_parts
from qshard.nn.norms import normalize


def norm_linear(x: Tensor, norm: tuple, multiply: Multiply, weights, biases) -> tuple[Tensor, Tensor]:
    """(linear(norm(x)), norm(x)). norm: what `normalize` takes after x."""
    normed = normalize(x, *norm)
    return multiply_parts(multiply, normed, weights, biases), normed


def activation_linear(
    x: Tensor, activation: str, params: dict | None, multiply: Multiply, weight: Tensor, bias
) -> Tensor:
    """linear(activation(x))."""
    return multiply(activate(x, activation, params), weight, bias)
