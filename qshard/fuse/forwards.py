"""Forwards of plain modules that find other steps under names that their code has."""

import functools
import inspect
import types
from collections.abc import Callable, Sequence

import torch

from qshard.fuse.classes import Rebuilt


class Step:
    """What a forward calls in place of what its code names: a method in place of an attribute, or a function.
    Hashable; copied and pickled with the class. Nothing else in the code may have the name of an attribute."""

    name: str

    def attribute(self) -> Callable | None:
        """The method."""
        return None

    def function(self, plain: Callable) -> Callable:
        """In place of `plain`, of the forward's file."""
        return plain


class Rewritten(Rebuilt):
    """A module whose forward has the code that it had, and steps in place of some names."""


def takes_steps(module) -> bool:
    """Whether its forward is that of its class, of a kind whose forward is not a fused one as a whole."""
    is_plain = not isinstance(module, Rebuilt) or "_qshard_steps" in vars(type(module))
    return is_plain and "forward" not in module.__dict__


def rewrite(module, steps: Sequence[Step]) -> None:
    """Gives a module steps, besides those that it has."""
    if not steps:
        return
    known = steps_of(module)
    module.__class__ = rewritten(plain_class(module), (*known, *(s for s in steps if s not in known)))


def steps_of(module) -> tuple[Step, ...]:
    return vars(type(module)).get("_qshard_steps", ())


def plain_class(module) -> type:
    """The module's, without steps."""
    return vars(type(module)).get("_qshard_plain", type(module))


def name_of(step: str) -> str:
    """By which the code finds it."""
    return f"_qshard_step_{step}"


@functools.cache
def rewritten(kind, steps):
    methods = {step.name: step.attribute() for step in steps}
    methods = {name: method for name, method in methods.items() if method is not None}
    functions = tuple(step for step in steps if step.name not in methods)
    members = {
        "forward": _calling(_renamed(kind.forward, methods), functions),
        "_qshard_made_of": (rewritten, kind, steps),
        "_qshard_plain": kind,
        "_qshard_steps": steps,
        # Wrapping policies and device maps find layers by the names of their classes.
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    members |= {name_of(name): method for name, method in methods.items()}
    return type(kind.__name__, (Rewritten, kind), members)


def undecorated(forward: Callable) -> types.FunctionType | None:
    """What is within decorators of Python that hold it in their closures, as Hugging Face's checkpointing
    layers do, else None."""
    while inspect.isfunction(forward):
        wrapped = getattr(forward, "__wrapped__", None)
        if wrapped is None:
            return forward
        if forward.__globals__.get("__name__", "").startswith("torch."):
            return None  # its decorators keep more than closures
        if sum(_content(cell) is wrapped for cell in forward.__closure__ or ()) != 1:
            return None
        forward = wrapped
    return None


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _renamed(forward, methods):
    """`forward`, whose code finds methods in place of the attributes that they are for; within its
    decorators."""
    if not methods:
        return forward
    code, closure = forward.__code__, forward.__closure__
    wrapped = getattr(forward, "__wrapped__", None)
    if wrapped is None:
        names = (name_of(n) if n in methods else n for n in code.co_names)
        code = code.replace(co_names=tuple(names))
    else:
        wrapped = _renamed(wrapped, methods)
        cells = (types.CellType(wrapped) if _content(c) is forward.__wrapped__ else c for c in closure)
        closure = tuple(cells)
    made = types.FunctionType(
        code, forward.__globals__, forward.__name__, forward.__defaults__, closure
    )
    return _like(made, forward, wrapped)


def _like(made, forward, wrapped=None):
    functools.update_wrapper(made, forward)
    made.__kwdefaults__ = forward.__kwdefaults__
    if wrapped is None:
        del made.__wrapped__
    else:
        made.__wrapped__ = wrapped
    return made


def _calling(forward, functions):
    """`forward`, which finds steps in place of functions of its file, but in compiled code, which fuses what
    those compute."""
    if not functions:
        return forward

    def call(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        return _with_functions(forward, functions)(self, *args, **kwargs)

    return call


@functools.cache
def _with_functions(forward, functions):
    """The file's other names are those of the first call."""
    known = forward.__globals__
    known = {**known, **{step.name: step.function(known[step.name]) for step in functions}}
    made = types.FunctionType(
        forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__
    )
    return _like(made, forward)
