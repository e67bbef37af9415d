"""Initial values of parameters."""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn import init

# TransformerEngine's, for weights whose init_method is None.
default_init_method = functools.partial(init.normal_, mean=0.0, std=0.023)


def gamma_init(zero_centered_gamma: bool) -> Callable:
    """How a normalization's weight is initialized."""
    return init.zeros_ if zero_centered_gamma else init.ones_


def linear_weight(weight: torch.Tensor) -> None:
    """nn.Linear's."""
    init.kaiming_uniform_(weight, a=math.sqrt(5))


def linear_bias(in_features: int) -> Callable:
    """nn.Linear's."""
    bound = 1 / math.sqrt(in_features) if in_features > 0 else 0
    return functools.partial(init.uniform_, a=-bound, b=bound)


def each_matrix(initialize: Callable) -> Callable:
    """An initializer of stacks, by one of matrices: one after the other, as parameters of their own would be."""
    return functools.partial(_one_by_one, initialize)


def _one_by_one(initialize, stack):
    for matrix in stack:
        initialize(matrix)


def truncated_normal(std: float) -> Callable:
    """torchtitan's, which cuts at -2 and 2."""
    return functools.partial(init.trunc_normal_, mean=0.0, std=std)


def halves(initialize: Callable, fork: Callable) -> tuple[tuple, tuple]:
    """Initializers of two parameters that are one's halves by rows: the values of the whole are drawn for the first."""
    kept = []
    first = functools.partial(_first_half, initialize, kept)
    return (first, fork), (functools.partial(_second_half, kept), nullcontext)


def _first_half(initialize, kept, tensor):
    whole = tensor.new_empty((2 * tensor.shape[0], *tensor.shape[1:]))
    initialize(whole)
    first, second = whole.chunk(2)
    tensor.copy_(first)
    kept[:] = [second]


def _second_half(kept, tensor):
    tensor.copy_(kept.pop())
