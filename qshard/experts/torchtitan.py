"""GroupedExperts of torchtitan 0.2 with quantized stacks: by `grouped_linear`, which asks for no padding, reads no number
of a device on the host and leaves activations alone with weight_only."""

import functools
import sys

import torch
import torch.nn.functional as F

from qshard.experts import stacks
from qshard.modules.made_classes import made_class
from qshard.nn.parts.grouped import ends_of_counts


def _forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
    offs = ends_of_counts(num_tokens_per_expert)
    y = stacks.swiglu(self, x, "w1", "w3", "w2", offs)
    if y is not None:
        return y
    h = F.silu(stacks.multiply(self, x, "w1", offs)) * stacks.multiply(self, x, "w3", offs)
    return stacks.multiply(self, h, "w2", offs)


def runs_as_experts(cls: type) -> bool:
    """Whether the forward of a class is torchtitan's own, or was before `quantized_class`."""
    moe = sys.modules.get("torchtitan.models.moe.moe")
    return moe is not None and cls.forward in (moe.GroupedExperts.forward, _forward)


@functools.cache
def quantized_class(cls: type) -> type:
    """The class of a module of class `cls`, which runs_as_experts, with quantized stacks."""
    if cls.forward is _forward:
        return cls
    return made_class(cls, (quantized_class, (cls,)), forward=_forward, _qshard_experts_of=cls)


def plain_class(cls: type) -> type:
    """What quantized_class was given; any other class itself."""
    return vars(cls).get("_qshard_experts_of", cls)
