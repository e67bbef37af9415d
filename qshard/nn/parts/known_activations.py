"""Activations of gated MLPs: functions, and modules of known classes."""

import functools
import sys

import torch
import torch.nn.functional as F
from torch import nn as torch_nn
from torch.nn.modules import module as torch_module

from qshard.modules.calls import runs
from qshard.modules.packages import TRANSFORMERS

# By their objects. The values are names of qshard.nn's gated activations.
_FUNCTIONS = {
    F.silu: "swiglu",
    F.relu: "reglu",
    torch.relu: "reglu",
    F.sigmoid: "glu",
    torch.sigmoid: "glu",
}
_CLASSES = {torch_nn.SiLU: "swiglu", torch_nn.ReLU: "reglu", torch_nn.Sigmoid: "glu"}
_HOLDERS = {}  # classes of modules that call the activation that an attribute of this name holds


def add_class(cls: type, name: str) -> None:
    """Makes modules of exactly this class known, by the name of a gated activation."""
    _CLASSES[cls] = name


def add_holder(cls: type, attribute: str) -> None:
    """Makes modules of exactly this class known, which call what the attribute holds."""
    _HOLDERS[cls] = attribute


def gated_name(activation) -> str | None:
    """The name of the gated activation that a function or a module is half of, or None."""
    if isinstance(activation, torch_nn.Module):
        if type(activation) is torch_nn.GELU:
            return "geglu" if activation.approximate == "tanh" else None
        holder = _HOLDERS.get(type(activation))
        if holder is not None:
            return gated_name(getattr(activation, holder))
        return _CLASSES.get(type(activation))
    if type(activation) is functools.partial:
        is_tanh = activation.func is F.gelu and activation.keywords == {"approximate": "tanh"}
        return "geglu" if is_tanh and not activation.args else None
    try:
        return _FUNCTIONS.get(activation)
    except TypeError:  # not hashable: an object with __call__
        return None


def know_activations() -> None:
    """Makes those of transformers known, if a known version of it is loaded."""
    module = sys.modules.get("transformers.activations")
    if module is None or not TRANSFORMERS.is_known():
        return
    file = vars(module)
    activations = (("SiLUActivation", add_class, "swiglu"), ("GELUTanh", add_holder, "act"))
    for name, add, known in activations:
        cls = file.get(name)
        if cls is not None and TRANSFORMERS.defines(cls.forward, file):
            add(cls, known)


def name_now(activation) -> str | None:
    """gated_name, or None where a call of the activation does more, or hooks see it."""
    if has_more(activation) or (not torch.compiler.is_compiling() and are_calls_watched()):
        return None
    return gated_name(activation)


def has_more(function) -> bool:
    """Whether a call of a module does more than its class's forward; of other functions False."""
    return isinstance(function, torch_nn.Module) and not runs(function, type(function).forward)


def are_calls_watched() -> bool:
    """Whether hooks see the calls of all modules."""
    return bool(torch_module._has_any_global_hook())
