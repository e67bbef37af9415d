"""How a known module of another library multiplies by a stack, as quantize_ noted it."""

import torch
from torch import Tensor, nn

from qshard._runtime.hooks import holds_codes
from qshard import module_state
from qshard.nn.parts.grouped import grouped_linear, local_part, swiglu_experts


def is_quantized_stack(module: nn.Module, name: str) -> bool:
    """Whether a stack is quantized, or stands for one that was."""
    return format_of(module, name) is not None or holds_codes(local_part(getattr(module, name)))


def multiply(module: nn.Module, x: Tensor, name: str, offs: Tensor, bias=None, is_transposed=False) -> Tensor:
    """The rows of each expert by its matrix (out, in), or (in, out)."""
    weight = local_part(getattr(module, name))
    return grouped_linear(
        x,
        weight.mT if is_transposed else weight,
        offs,
        bias,
        is_quantized=is_quantized_stack(module, name),
        weight_only=module_state.current(module).weight_only,
        weight_format=format_of(module, name),
    )


def swiglu(module: nn.Module, x: Tensor, gate: str, up: str | None, down: str, offs: Tensor) -> Tensor | None:
    """down(silu(gate(x)) * up(x)) of the rows of each expert by one operator, which gives the bits of `multiply`, or None
    where a stack is plain, or gate and up have two formats. up None: gate is both, gate's rows first."""
    formats = [format_of(module, name) for name in (gate, up or gate, down)]
    if None in formats or formats[0] != formats[1]:
        return None
    stacks = [None if name is None else local_part(getattr(module, name)) for name in (gate, up, down)]
    weight_only = module_state.current(module).weight_only
    return swiglu_experts(x, *stacks, offs, weight_only=weight_only, format=formats[0], down_format=formats[2])


def format_of(module: nn.Module, name: str) -> str | None:
    """The format of a stack that quantize_ chose; None of a plain one."""
    return (module_state.current(module).weight_formats or {}).get(name)


def message_format(module: nn.Module, name: str) -> str | None:
    """The format of a stack, if it is what activations are quantized by."""
    stack = local_part(getattr(module, name))
    if module_state.current(module).weight_only:
        return None
    return format_of(module, name) or (torch.ops.qshard.format(stack) if holds_codes(stack) else None)
