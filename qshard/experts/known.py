"""Which modules are experts of other libraries, and which of their parameters are stacks of matrices.

A class is known by the function that is its forward, and by no name of an attribute: what another forward makes of
such parameters cannot be known. A library that nobody imported has no modules, so none is imported here."""

import sys

import torch
from torch import nn

_VALUES = (torch.float32, torch.bfloat16, torch.float16)
_TORCHTITAN = ("torchtitan.models.moe.moe", "torchtitan.models.common.moe")  # 0.2, 0.3


def is_of_transformers(module: nn.Module) -> bool:
    """Whether transformers' use_experts_implementation has given the module's class its forward, which calls what
    experts_implementation names."""
    moe = sys.modules.get("transformers.integrations.moe")
    return moe is not None and getattr(type(module).forward, "__globals__", None) is vars(moe)


def is_of_torchtitan(module: nn.Module) -> bool:
    """Whether the module multiplies as torchtitan's GroupedExperts do."""
    for name in _TORCHTITAN:
        cls = getattr(sys.modules.get(name), "GroupedExperts", None)
        if cls is not None and isinstance(module, cls) and type(module).forward is cls.forward:
            return True
    return False


def stack_names(module: nn.Module) -> tuple[str, ...]:
    """The parameters (experts, rows, columns) that a known module multiplies by; of any other module none. Weights
    of models that were loaded in another low-bit format are none."""
    if is_of_transformers(module):
        names = ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
    elif is_of_torchtitan(module):
        names = tuple(module._parameters)
    else:
        return ()
    return tuple(name for name in names if _is_stack(module._parameters.get(name)))


def _is_stack(parameter):
    return parameter is not None and parameter.dim() == 3 and parameter.dtype in _VALUES
