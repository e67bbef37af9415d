"""Which modules are experts of other libraries, which of their parameters are stacks of matrices, and what quantize_
does to the modules.

A class is known by the function that is its forward, and by no name of an attribute: what another forward makes of
such parameters cannot be known. A library that was not imported has no modules, so none is imported here."""

import sys

import torch
from torch import nn

from qshard import module_state
from qshard.experts import torchtitan, transformers
from qshard.modules.made_classes import plain_forward

_VALUES = (torch.float32, torch.bfloat16, torch.float16)


def is_of_transformers(module: nn.Module) -> bool:
    """Whether transformers' use_experts_implementation has given the module's class its forward."""
    return transformers.runs_as_experts(type(module))


def is_of_torchtitan(module: nn.Module) -> bool:
    """Whether the module multiplies as torchtitan's GroupedExperts do, of 0.2 or 0.3."""
    moe = sys.modules.get("torchtitan.models.common.moe")
    is_of_0_3 = moe is not None and type(module).forward is moe.GroupedExperts.forward
    return is_of_0_3 or torchtitan.runs_as_experts(type(module))


def is_of_llama4(module: nn.Module) -> bool:
    """Whether the module multiplies as the experts of transformers' Llama 4 do: by stacks (experts, in, out), of which the first
    has the columns of gate before those of up."""
    llama4 = sys.modules.get("transformers.models.llama4.modeling_llama4")
    return llama4 is not None and plain_forward(type(module)) is llama4.Llama4TextExperts.forward


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


def why_not_weight_only(module: nn.Module) -> str | None:
    """Why a module of another library would quantize activations nevertheless, and the way out; None if it would not."""
    if is_of_transformers(module):
        if transformers.is_chosen(module):
            return None
        transformers.register()
        return (
            f'experts_implementation="{module.config._experts_implementation}" multiplies as it does; call '
            f'model.set_experts_implementation("{transformers.NAME}") before'
        )
    if torchtitan.runs_as_experts(type(module)):
        return None
    return f"{type(module).__name__} multiplies as it does; leave it out, or quantize it by a call without weight_only"


def prepare(module: nn.Module, weight_only: bool) -> None:
    """What a module needs whose stacks were quantized; any other module stays as it is."""
    if is_of_transformers(module):
        transformers.prepare(module, weight_only)
    elif torchtitan.runs_as_experts(type(module)):
        module.__class__ = torchtitan.quantized_class(type(module))
    else:
        return
    module_state.of(module).weight_only = weight_only


def forget(module: nn.Module) -> None:
    """Undoes `prepare`, but for what is noted in the state of the module."""
    plain = torchtitan.plain_class(type(module))
    if plain is not type(module):
        module.__class__ = plain
