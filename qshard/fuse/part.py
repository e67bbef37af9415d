"""What a registered class says of its modules: in which steps they are computed, and which are
not."""

import inspect
from typing import ClassVar, NamedTuple

from torch import nn as torch_nn


class Reason(NamedTuple):
    """Why a module is left as it is. `fuse_` warns of what the module's owner may not know."""

    text: str
    warns: bool = False


class Part:
    """How modules of one class are computed in fewer steps. Parts are hashable: a class and its
    part make one fused class."""

    operands: ClassVar[int] = 1  # of a forward, after the module

    def reason(self, module: torch_nn.Module) -> Reason | None:
        """Why a module is left as it is, or None where it is fused."""
        return None

    def describe(self, module: torch_nn.Module) -> str:
        raise NotImplementedError

    def run(self, module: torch_nn.Module, *operands):
        """What forward returns, or None where the plain forward has to run. Asked at each call."""
        raise NotImplementedError

    def forward(self, cls: type):
        """The forward of the fused class: run(module, *operands), and the plain forward where that
        is None, or where other arguments are given than the operands. A function written in each
        kind of part, because torch.compile counts recompilations by the code of functions."""
        raise NotImplementedError

    def names(self, cls: type) -> tuple[str, ...]:
        """The operands', by the signature of the class's forward."""
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
        given = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(given) < self.operands:
            raise ValueError(
                f"qshard.fuse.register: {type(self).__name__} takes {self.operands} arguments by "
                f"name, and {cls.__name__}.forward{inspect.signature(cls.forward)} has {len(given)}"
            )
        return tuple(given[: self.operands])


def operands_of(names, args, kwargs):
    """What is given for these parameters, by position, or None where other arguments are given."""
    if len(args) + len(kwargs) != len(names):
        return None
    if not kwargs:
        return args
    rest = names[len(args) :]
    return (*args, *(kwargs[n] for n in rest)) if all(n in kwargs for n in rest) else None
