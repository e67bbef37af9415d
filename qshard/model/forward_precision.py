"""set_forward_precision: forward from masters for the last part of training."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from qshard import module_state
from qshard._runtime.hooks import local_of
from qshard.dynamic_weights import modules as dynamic_modules
from qshard.dynamic_weights.fsdp1 import prepared_units
from qshard.formats import info_of
from qshard.model import state_buffers
from qshard.model.dequantize import plain
from qshard.model.quantize import forget_module, is_quantized
from qshard.module_state import dynamics_of
from qshard.modules import fsdp2, parameter_swap
from qshard.nn.linear import Linear
from qshard.nn.linear_subclasses import runs_as_linear

ops = torch.ops.qshard
_NAME = "qshard.set_forward_precision"
_WAY_OUT = (
    "save a checkpoint, call qshard.dequantize_(model) or build the model without quantize_, fully_shard it and load "
    "the checkpoint: then forward and backward are in bf16"
)


@parameter_swap.outside_inference_mode
def set_forward_precision(model: nn.Module, precision: str) -> nn.Module:
    """Lets quantized linears multiply their masters, rounded to bf16, in forward, and codes in backward, from now on;
    returns the model. NVIDIA's NVFP4 training may end so: with forward in bf16 for the last part of training the loss
    was 0.5 % above bf16's, and 1.5 % without (arXiv:2509.25149).

        qshard.set_forward_precision(model, "bf16")      # between two steps, on all ranks

    The weights become plain parameters of their masters' values, and stay the objects that they are: the optimizer
    goes on with its state, and state_dicts have the same names and values. Each backward quantizes the weight that
    it is given, by its recipe, as it quantizes inputs and gradients. Under `fully_shard` FSDP2 gathers the plain
    weights, in `MixedPrecisionPolicy.param_dtype` (bf16: two bytes per element), and backward quantizes those.
    Compiled code is compiled again, and a CUDA graph has to be captured again. A model that is built for a checkpoint
    of this part of training calls it after `quantize_` and `fully_shard`.

    model: of quantized linears, in one process, under `fully_shard` before and after its first forward, or with
        weights="dynamic" under FSDP1 and DDP.
    precision: "bf16". Outputs have the dtype of the activations.

    All ranks call it, and it sends nothing. Raises, on every rank and before anything is changed, ValueError for
    weights without a master, and for a model without quantized weights; NotImplementedError for delayed scaling,
    tensor parallelism, FSDP1's units that gather codes, and modules other than linears (qshard.nn's fused ones,
    experts); RuntimeError under DistributedDataParallel, while a graph that uses a weight is alive, and while
    gradients wait for their reduction. `qshard.dequantize_` turns backward to bf16, too.
    """
    if precision != "bf16":
        raise ValueError(f'{_NAME}: precision is "bf16", got {precision!r}')
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a root's weights may still be gathered after its forward
    dynamics, chosen = list(dynamics_of(model)), _chosen(model)
    if not chosen and not dynamics:
        raise ValueError(f"{_NAME}: the model has no quantized weights; call qshard.quantize_ first")
    for _, dynamic in dynamics:
        _check_format("a linear", dynamic.format)
    if any(unit.gathers_codes for unit in prepared_units(model).values()):
        raise NotImplementedError(
            f"{_NAME}: FSDP1 gathers codes of these weights, and forward in bf16 reads values; call "
            'qshard.prepare_for_fsdp1(model, gather="param_dtype") from the beginning'
        )
    of_linears = {id(module.weight) for _, module in chosen if _is_linear(module)}
    for name, module in chosen:
        _check(name, module, of_linears)
    if chosen:
        _check_wrapper(model)
    weights = {id(module.weight): (name, module.weight) for name, module in chosen}
    for name, weight in weights.values():
        parameter_swap.check(weight, f"{name}.weight", _NAME)
    _change(model, chosen, [weight for _, weight in weights.values()])
    for _, dynamic in dynamics_of(model):
        dynamic.forward_precision = precision
    return model


def _chosen(model):
    """(name, module) of what has a quantized parameter of its own."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(is_quantized(p) for p in module._parameters.values() if p is not None)
    ]


def _check_format(name, format):
    if info_of(format).amax_history is not None:
        raise NotImplementedError(
            f"{_NAME}: {name} has a {format} weight, whose scales are of earlier steps' codes; {_WAY_OUT}"
        )


def _is_linear(module):
    """Whether it multiplies as nn.Linear does."""
    return (isinstance(module, Linear) and not module.is_constructed) or runs_as_linear(type(module))


def _check(name, module, of_linears):
    is_tied = isinstance(module, nn.Embedding) and id(module.weight) in of_linears
    if not _is_linear(module) and not is_tied:
        raise NotImplementedError(
            f"{_NAME}: {name} is a {type(module).__name__}, and forward of linears alone can be in bf16; {_WAY_OUT}"
        )
    state, weight = module_state.find(module), module.weight
    if state.is_tensor_parallel or state.parallel is not None or state.style is not None:
        raise NotImplementedError(f"{_NAME}: tensor parallelism of {name} is not supported; {_WAY_OUT}")
    if ops.master(local_of(weight).detach()) is None:
        raise ValueError(
            f"{_NAME}: the weight of {name} has no master, so forward has nothing better than its codes; quantize_ "
            "with keep_master=True from the beginning"
        )
    _check_format(name, ops.format(local_of(weight)))


def _check_wrapper(model):
    """FSDP2 may have run, which `parameter_swap.check_model` refuses: its parameters are renewed."""
    parameters = fsdp2.parameters_of(model)
    if not parameters:
        return parameter_swap.check_model(model, _NAME)
    for fsdp_param in parameters:
        unsharded = getattr(fsdp_param, "_unsharded_param", None)
        accumulated = getattr(fsdp_param, "unsharded_accumulated_grad", None)
        if accumulated is not None or getattr(unsharded, "grad", None) is not None:
            raise RuntimeError(
                f"{_NAME}: gradients of {fsdp_param._param_fqn} wait for their reduction; call it between steps, "
                "after optimizer.step()"
            )


def _change(model, chosen, weights):
    ways = {}
    for name, module in chosen:
        if _is_linear(module):
            state = module_state.find(module)
            format = ops.format(local_of(module.weight))
            ways.setdefault((_unrounded(format), state.weight_only), []).append((name, module))
    renewed = [p for p in fsdp2.parameters_of(model) if any(p.sharded_param is weight for weight in weights)]
    for weight in weights:
        parameter_swap.replace(weight, plain(weight))
    for _, module in chosen:
        state_buffers.unlink(module)
        forget_module(module)
    for (format, weight_only), linears in ways.items():
        dynamic_modules.quantize_at_each_use(model, linears, format, weight_only, None)
    for fsdp_param in renewed:
        fsdp2.renew(fsdp_param)


def _unrounded(format):
    """A format without stochastic rounding of what steps make: the weight is its own master now."""
    base, _, options = format.removesuffix("]").partition("[")
    kept = ",".join(option for option in options.split(",") if option != "stochastic")
    return f"{base}[{kept}]" if kept else base
