"""What is put in the place of a module's quantized parameter.

torch calls `watch_registration` for `register_parameter`, and for assignments, which call that. Code that writes
`module._parameters` itself, as hooks of accelerate that offload weights do, is noticed when the module is used: by a
forward hook before the forward of a class that is none of qshard's, and by the linears of qshard themselves.
"""

import sys
import warnings

import torch
from torch.distributed.tensor import DTensor

from qshard._runtime.classes import TensorState
from qshard._runtime.hooks import has_tensor_type, holds_codes, local_of
from qshard._runtime.library import has_key
from qshard._runtime.patches import call
from qshard._runtime.placement import group_names, place, with_local
from qshard import module_state

ops = torch.ops.qshard


def watch_registration(module, name, param):
    """Refuses what frameworks register in place of a quantized parameter: parallelize_module a DTensor, and
    others a plain tensor that is a rank's part of it. Either has values and no codes, or shows each rank's
    window as a tensor of its own. Their users mean to go on with quantized weights. Matrices of a stack are
    quantized apart from each other, so that one which is handed out by Shard(0) goes on with their codes: the hook
    returns what is registered then.

    Code that assigns means what it assigns. FSDP2, where a module has a __setattr__ of its own, assigns the
    shards that it registers with no other."""
    old = module._parameters.get(name)
    if old is None or param is None or param is old or not holds_codes(local_of(old)):
        return
    is_assigned = sys._getframe(2).f_code.co_name == "__setattr__"
    is_distributed = isinstance(param, DTensor) and not isinstance(old, DTensor)
    if holds_codes(local_of(param)) and (is_assigned or not is_distributed):
        return
    if is_distributed and old.dim() == 3 and param.shape == old.shape and all(map(_hands_out, param.placements)):
        return _replaced_stack(old, param)
    what = f"the {name} of this {type(module).__name__}"
    if is_distributed:
        raise NotImplementedError(
            f"qshard: parallelize_module after qshard.quantize_ would make {what} plain again; call "
            "parallelize_module first, then qshard.quantize_(model, recipe, tp_mesh=tp_mesh)"
        )
    if not is_assigned:
        raise NotImplementedError(
            f"qshard: register_parameter would put a plain parameter of shape {tuple(param.shape)} in "
            f"the place of {what}, which is quantized, of shape {tuple(old.shape)}. What cuts or "
            "replaces weights (a framework's parallelize) comes first, then qshard.quantize_(model, "
            "recipe); to mean a plain weight, call qshard.dequantize_ before"
        )
    if module_state.find(module).weight_format is None:  # else it quantizes the weight at each use, and tells then
        _tell(module, name, stacklevel=5)


def watch_use(module: torch.nn.Module) -> None:
    """For a module with quantized parameters of its own and a forward that is none of qshard's, which reads whatever
    it finds: it tells at its next use of those that are plain by then."""
    hook = module.register_forward_pre_hook
    module_state.of(module).add_hooks("use", lambda: [hook(_tell_of_plain)])


def _tell_of_plain(module, *_):
    if torch.compiler.is_dynamo_compiling():
        sys.modules["torch._dynamo.comptime"].comptime(_tell_while_traced)
    elif not torch.compiler.is_compiling():
        _tell_of_each(module)


def _tell_while_traced(context):
    """Dynamo calls this with what it knows of the hook's variables, and traces none of it: what is traced does not say
    whether it stands for a quantized tensor (torch/_dynamo/comptime.py)."""
    _tell_of_each(context.get_local("module")._i_will_not_complain_if_bc_breaks_VariableTracker().value)


def _tell_of_each(module):
    for name in module_state.current(module).weight_formats or ():
        if is_plain_parameter(module._parameters.get(name)):
            _tell(module, name, stacklevel=2)


def is_plain_parameter(parameter):
    """Not what functional_call is given for one call, nor a fake tensor."""
    local = local_of(parameter)
    return isinstance(parameter, torch.nn.Parameter) and has_tensor_type(local) and not has_key(local)


def quantized_on_use(module: torch.nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A plain weight, or the local part of one, as an operator that quantizes it for this use is to get it. Tells of a
    parameter. The operator would do so once in a process and without a name, and says nothing of a view."""
    if not is_plain_parameter(module._parameters.get(name)):
        return weight
    _tell(module, name, stacklevel=2)
    return weight.view_as(weight)


def _tell(module, name, stacklevel):
    """Once for each parameter."""
    state = module_state.of(module)
    if name in state.told:
        return
    state.told = (*state.told, name)
    kind = type(module).__name__
    what = f"{state.name}.{name} of a {kind}" if state.name else f"the {name} of this {kind}"
    how = "is quantized at each use" if state.weight_format else "the forward reads as it is"
    warnings.warn(
        f"qshard: {what} was quantized, and a plain parameter was put in its place, which {how} and FSDP2 gathers in "
        "full; call qshard.quantize_(model, recipe) again, or write values into the quantized parameter by copy_()",
        stacklevel=stacklevel,
    )


def _hands_out(placement):
    return placement.is_replicate() or placement.is_shard(0)


def _replaced_stack(stack, param):
    """The matrices of a stack that a DTensor of its values has on this rank, as a quantized tensor of their own. The
    values are those of the DTensor, whose first rank may have sent others than this one had."""
    mesh, placements, shape, local = param.device_mesh, param.placements, stack.shape, param._local_tensor
    ranks = [name for name in group_names(mesh) if name]
    placement = place(mesh, placements, shape, ranks, "a stack")
    first, count = placement.first_element // shape[1:].numel(), placement.logical_rows // shape[1]
    with torch.no_grad():
        if local.is_meta:
            values = torch.empty((count, *shape[1:]), dtype=stack.dtype, device="meta")
            part = ops.quantize(values, ops.format(stack), keep_master=TensorState(stack).keeps_master())
        else:
            ids = torch.arange(first, first + count, device=stack.device)
            part = stack.detach().index_select(0, ids).to(local.device)
            if not torch.equal(part + 0, local + 0):
                part.copy_(local)
        state = TensorState(part).scaling_state()
        if "rounding" in state:
            state["rounding"].copy_(TensorState(stack.detach()).scaling_state()["rounding"])
    return torch.nn.Parameter(with_local(part, param), requires_grad=param.requires_grad)


call("torch.nn.modules.module:register_module_parameter_registration_hook", watch_registration)
