"""dequantize_: the way back from quantize_."""

import torch
from torch import nn as torch_nn
from torch.distributed.tensor import DTensor

from qshard._runtime.hooks import local_of
from qshard._runtime.placement import with_local
from qshard.model import state_buffers
from qshard.model.quantize import forget_module, is_quantized
from qshard.module_state import dynamics_of, find
from qshard.modules import parameter_swap

ops = torch.ops.qshard


@parameter_swap.outside_inference_mode
def dequantize_(model: torch_nn.Module) -> torch_nn.Module:
    """Makes every quantized parameter of a model a plain one again, in place, and returns the model.

    The parameters stay the objects that they are, and modules become those of torch.nn again. Values
    are those of the masters, and without a master what the codes stand for, in the parameter's dtype:
    what a model trained without masters computed, but for the rounding of activations. Weights that
    stay plain (weights="dynamic") are quantized no more.

    model: as for `quantize_`, and refused by the same named errors before anything is changed: under
        `fully_shard` before its first forward, before DistributedDataParallel(model), no weight in
        use by a graph that is alive.
    """
    parameter_swap.check_model(model, "qshard.dequantize_")
    weights = [(name, p) for name, p in model.named_parameters() if is_quantized(p)]
    for name, parameter in weights:
        parameter_swap.check(parameter, name, "qshard.dequantize_")
    modules = [m for m in model.modules() if any(is_quantized(p) for p in _own(m)) or _was_quantized(m)]
    dynamic = [m for m, _ in dynamics_of(model)]
    for _, parameter in weights:
        parameter_swap.replace(parameter, plain(parameter))
    for module in modules:
        state_buffers.unlink(module)
    for module in modules + dynamic:
        forget_module(module)
    return model


def _was_quantized(module):
    """Also of weights in whose place something put plain ones."""
    state = find(module)
    return state.weight_format is not None or state.weight_formats is not None


def _own(module):
    return (p for p in module._parameters.values() if p is not None)


def plain(parameter):
    """A parameter's values as a tensor of its own, a DTensor's as a DTensor."""
    local = local_of(parameter).detach()
    with torch.no_grad():
        values = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        if not local.is_meta:
            values.copy_(local)
    return with_local(values, parameter) if isinstance(parameter, DTensor) else values
