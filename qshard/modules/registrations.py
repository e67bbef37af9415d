"""What is put in the place of a module's quantized parameter.

torch calls the hook below for `register_parameter`, and for assignments, which call that. Code that writes
`module._parameters` itself is not seen here; a linear then says at its next use that its weight is plain.
"""

import sys
import warnings

from torch.distributed.tensor import DTensor

from qshard._runtime.hooks import is_quantized, local_of
from qshard._runtime.patches import call
from qshard.module_state import find


def watch_registration(module, name, param):
    """Refuses what frameworks register in place of a quantized parameter: parallelize_module a DTensor, and
    others a plain tensor that is a rank's part of it. Either has values and no codes, or shows each rank's
    window as a tensor of its own. Their users mean to go on with quantized weights.

    Code that assigns means what it assigns. FSDP2, where a module has a __setattr__ of its own, assigns the
    shards that it registers with no other."""
    old = module._parameters.get(name)
    if old is None or param is None or param is old or not is_quantized(local_of(old)):
        return
    is_assigned = sys._getframe(2).f_code.co_name == "__setattr__"
    is_distributed = isinstance(param, DTensor) and not isinstance(old, DTensor)
    if is_quantized(local_of(param)) and (is_assigned or not is_distributed):
        return
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
    if find(module).weight_format is None:  # else it quantizes the weight at each use
        warnings.warn(
            f"qshard: {what} was quantized, and a plain parameter was assigned in its place, which is used "
            "as it is and gathered in full; call qshard.quantize_(model, recipe) again to quantize it",
            stacklevel=4,
        )


call("torch.nn.modules.module:register_module_parameter_registration_hook", watch_registration)
