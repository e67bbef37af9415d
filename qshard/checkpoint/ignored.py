"""ignored_modules: what a reader is told to leave alone, in its words.

Readers' rules, with the sources that they were read in: vLLM's "fp8" compares whole names and asks for the parts of what it
fuses (fp8.py at 1436674b, utils/quant_utils.py at 01693a61); its compressed-tensors takes equal names or "re:" patterns; its
modelopt takes wildcards, and earlier versions took every name that holds one of these.
"""

import re
import warnings

from torch import nn

from qshard.checkpoint import engines, layouts
from qshard.checkpoint.model import entries_of, plain_linears

_FUNCTION = "qshard.checkpoint.ignored_modules"


def ignored_modules(model: nn.Module, *, layout: str, names=None, fused=None) -> list[str]:
    """The linears of a model that stay plain, as the reader of a layout wants to be told: for its
    `modules_to_not_convert`, `ignore` or `exclude_modules`. No collective; but under `fully_shard` call it on all ranks:
    it asks for a state_dict, before which FSDP2 reshards what a forward has left gathered.

    layout, names, fused: as for `quantized_tensors`.

    Readers that fuse linears look for the names of the parts. Where a name is the beginning of a quantized module's, as
    "mlp.gate" is of "mlp.gate_up_proj", readers that look for it in other names would leave that one alone, too:
    "compressed-tensors" gets a pattern that ends with the name; for "modelopt", whose wildcards cannot say so, a
    warning names both.
    """
    try:
        layouts.check(layout)
        entries = [entry for entry in entries_of(model, names) if entry.name.endswith(".weight")]
        plain = plain_linears(model, names)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise type(error)(f"{_FUNCTION}: {error}") from error
    mapping = engines.FUSED if fused is None else fused
    quantized = {entry.module for entry in entries if entry.is_quantized}
    for module in list(quantized):
        parent, _, part = module.rpartition(".")
        quantized |= {f"{parent}.{name}".lstrip(".") for name, parts in mapping.items() if part in parts}
    result = []
    for name in plain:
        swallowed = sorted(module for module in quantized if name in module)
        if swallowed and layout == "compressed-tensors":
            name = f"re:{re.escape(name)}$"
        elif swallowed and layout == "modelopt":
            warnings.warn(
                f"{_FUNCTION}: {name} is a part of the name {swallowed[0]}, which is quantized: readers that look for ignored "
                "names in others, as earlier versions of vLLM do, would leave that one plain",
                stacklevel=2,
            )
        result.append(name)
    return result
