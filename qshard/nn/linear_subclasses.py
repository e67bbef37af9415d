"""Linears of classes that are no torch.nn.Linear themselves, but multiply as it does."""

import functools

import torch
from torch import nn as torch_nn
from torch.nn import functional as F

from qshard import module_state
from qshard.modules.made_classes import made_class
from qshard.nn.linear import Linear, multiply


Multiplies = module_state.ModuleState  # by this name pickles of earlier versions find it


def _forward(self, input: torch.Tensor) -> torch.Tensor:
    state = module_state.current(self)
    if state.weight_format is None:
        if state.awaits is not None:
            raise RuntimeError(
                "qshard: a converter of torchtitan chose this linear, whose weight is still plain; set "
                "model_spec.parallelize_fn = qshard_parallelize(model_spec.parallelize_fn)"
            )
        return F.linear(input, self.weight, self.bias)
    if state.dynamic is not None:
        return state.dynamic.linear(self, input, state)
    return multiply(self, input, state)


def _extra_repr(self) -> str:
    shown = type(self)._qshard_linear_of.extra_repr(self)
    return shown + module_state.current(self).shown_format()


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
    members = {name: vars(module_state.NamedState)[name] for name in module_state.NAMES_OF_STATE}
    return made_class(
        cls, (quantized_class, (cls,)), forward=_forward, extra_repr=_extra_repr, _qshard_linear_of=cls, **members
    )


def plain_class(cls: type) -> type:
    """What quantized_class was given; any other class itself."""
    return torch_nn.Linear if cls is Linear else vars(cls).get("_qshard_linear_of", cls)
