"""The names by which pickles find functions and classes of this package.

A pickle names a function by its module. Pickles of earlier versions must load, and earlier versions load what
this one writes, so these names stay what they were when the functions lay in other modules."""

import sys
from types import FunctionType

from qshard.dynamic_weights import modules, weights
from qshard.model import quantize, scale_groups, state_buffers
from qshard.nn.parts import initial

NAMES = {
    "qshard.dynamic": weights,
    "qshard.dynamic_modules": modules,
    "qshard.nn.initial": initial,
    "qshard.quantize": quantize,
    "qshard.scale_groups": scale_groups,
    "qshard.state": state_buffers,
}

for name, module in NAMES.items():
    sys.modules[name] = module
    for value in list(vars(module).values()):
        if isinstance(value, (FunctionType, type)) and value.__module__ == module.__name__:
            value.__module__ = name
