"""Which wrapper, optimizer and kind of checkpoint a model is used with, one line each, for qshard.report."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from qshard._runtime.classes import TensorState
from qshard._runtime.hooks import holds_codes, local_of
from qshard.dynamic_weights.fsdp1 import prepared_units
from qshard.model.choosing import some
from qshard.model.state_buffers import weights
from qshard.module_state import dynamics_of, find
from qshard.modules.registrations import is_plain_parameter

# Whose optimizers the tests run (test/python/optimizers/test_optimizers.py, test/python/clients).
_OPTIMIZERS = (
    "torch.optim.", "torchao.optim.", "bitsandbytes.optim.", "torchtitan.components.optimizer", "schedulefree.",
    "pytorch_optimizer.optimizer.muon.", "pytorch_optimizer.optimizer.soap", "pytorch_optimizer.optimizer.shampoo",
    "muon_fsdp2",
)
_OPTIMIZER_WRAPPERS = ("accelerate.", "lightning.", "lightning_fabric.")


def lines(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[str]:
    result = [f"wrapper: {_wrapper(model)}"]
    if optimizer is not None:
        result.append(f"optimizer: {_optimizer(model, optimizer)}")
    result.append(f"checkpoint: {_checkpoint(model)}")
    replaced = list(_replaced(model))
    if replaced:
        result.append(f"plain: {some(replaced)}, quantized before; call qshard.quantize_(model, recipe) again")
    return result


def _replaced(model):
    """Names of plain parameters that something put in the place of quantized ones."""
    for prefix, module in model.named_modules():
        state = find(module)
        names = state.weight_formats or ()
        if state.weight_format is not None and state.dynamic is None:
            names = [name for name, _ in weights(module)]
        for name in names:
            if is_plain_parameter(module._parameters.get(name)):
                yield f"{prefix}.{name}".lstrip(".")


def _wrapper(model):
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    modules = list(model.modules())
    if any(isinstance(m, FullyShardedDataParallel) for m in modules):
        return f"FullyShardedDataParallel (FSDP1): {_fsdp1(model)}"
    if any(isinstance(m, nn.DataParallel) for m in modules):
        return "DataParallel: not known; use DistributedDataParallel or fully_shard"
    if any(isinstance(m, FSDPModule) for m in modules):
        return "fully_shard (FSDP2): known"
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in modules):
        return "DistributedDataParallel: known"
    if any(isinstance(p, DTensor) for p in model.parameters()):
        if any(TensorState(local).groups() for local in _quantized_locals(model)):
            return "tensor parallelism, by parallelize_module or set_device_mesh: known"
        return "DTensors without fully_shard: not known"
    return "none: known"


def _quantized_locals(model):
    return [local for p in model.parameters() if holds_codes(local := local_of(p))]


def _fsdp1(model):
    if not _dynamic_weights(model):
        return 'not known; use fully_shard, or qshard.quantize_(model, recipe, weights="dynamic")'
    units = prepared_units(model).values()
    if not units:
        return 'known with weights="dynamic"; call qshard.prepare_for_fsdp1(model)'
    codes = sum(unit.gathers_codes for unit in units)
    return f'known with weights="dynamic"; {codes} of {len(units)} units gather codes'


def _dynamic_weights(model):
    """Each once, as tied modules have it."""
    return list({id(dynamic): dynamic for _, dynamic in dynamics_of(model)}.values())


def _optimizer(model, optimizer):
    while type(optimizer).__module__.startswith(_OPTIMIZER_WRAPPERS) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    known = kind.startswith(_OPTIMIZERS)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    quantized = [p for p in model.parameters() if holds_codes(local_of(p)) and p.requires_grad]
    missing = sum(id(p) not in held for p in quantized)
    text = f"{kind}: " + (
        "known" if known else "not known; a weight that has a gradient counts as written by its step"
    )
    if missing:
        text += f"; {missing} of {len(quantized)} quantized weights that are trained are not in it"
    return text


def _checkpoint(model):
    weights = [p for p in model.parameters() if holds_codes(local_of(p))]
    dynamics = _dynamic_weights(model)
    if not weights and dynamics:
        text = "plain tensors in state_dict(), which the weights are: as of the model without qshard"
        return text + ("; histories are in it" if any(d.state for d in dynamics) else "")
    if not weights:
        return "of a plain model"
    if any(isinstance(p, DTensor) for p in weights):
        text = "DTensors in state_dict(): known to DCP and get_model_state_dict, which write plain values"
    elif all(TensorState(local_of(p)).keeps_master() for p in weights):
        text = "plain tensors in state_dict(): known to DCP, torch.save and safetensors"
    else:
        text = (
            "quantized tensors without masters in state_dict(): known to DCP and torch.save; for "
            "safetensors call qshard.dequantize_(model)"
        )
    states = [s for s in map(find, model.modules()) if s.buffers]
    if states:
        is_in_it = all(s.is_persistent for s in states)
        text += "; histories and counts " + (
            "are in it" if is_in_it else "are not: save qshard.QuantizationState(model)"
        )
    return text
