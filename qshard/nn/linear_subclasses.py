"""Linears of classes that are no torch.nn.Linear themselves, but multiply as it does."""

import functools
from dataclasses import dataclass

import torch
from torch import nn as torch_nn
from torch.nn import functional as F

from qshard import module_state
from qshard.made_classes import made_class
from qshard.nn.linear import Linear, multiply


@dataclass
class Multiplies:
    """How a module multiplies, which qshard.nn.Linear keeps in attributes of its own. A subclass may have
    attributes of these names for something else."""

    weight_only: bool
    weight_format: str
    is_tensor_parallel: bool
    parallel = None  # the styles of qshard.tensor_parallel send values for it, as torch's do


def _forward(self, input: torch.Tensor) -> torch.Tensor:
    state = self.__dict__.get(module_state.NAME)
    if state is None or state.multiplies is None:
        return F.linear(input, self.weight, self.bias)
    return multiply(self, input, state.multiplies)


def runs_as_linear(cls: type) -> bool:
    """Whether the forward of a class is torch.nn.Linear's own, or was before `quantized_class`. The
    function is compared, because what a function of another library computes cannot be known."""
    return issubclass(cls, torch_nn.Linear) and cls.forward in (torch_nn.Linear.forward, _forward)


@functools.cache
def quantized_class(cls: type) -> type:
    """The class of a module of class `cls`, which runs_as_linear, with a quantized weight."""
    if cls is torch_nn.Linear:
        return Linear
    if cls.forward is _forward:
        return cls
    return made_class(cls, (quantized_class, (cls,)), forward=_forward, _qshard_linear_of=cls)


def plain_class(cls: type) -> type:
    """What quantized_class was given; any other class itself."""
    return torch_nn.Linear if cls is Linear else vars(cls).get("_qshard_linear_of", cls)


def is_taken_over(module: torch_nn.Module) -> bool:
    """Whether quantize_ prepared a module of a subclass."""
    state = module_state.find(module)
    return state is not None and state.multiplies is not None


def prepare(module, weight_only: bool, weight_format: str, is_tensor_parallel: bool) -> None:
    """Lets a module of a quantized_class, other than qshard.nn.Linear, multiply by its quantized weight."""
    module_state.of(module).multiplies = Multiplies(weight_only, weight_format, is_tensor_parallel)
