"""Fused classes: made at run time, subclasses of the classes whose modules they take over."""

import copyreg
import functools

from qshard.fuse.families import know_activations
from qshard.fuse.registry import find


class FusedType(type):
    """The type of fused classes. A pickle names the class that a fused class was made of: where it
    is read, modules are fused again if that class is known there, and are plain modules if it is
    not. All else is copied and pickled as the class itself says, by its `__getstate__` and the
    like."""


def _reduce(cls):
    made_of = vars(cls).get("_qshard_made_of")
    return cls.__qualname__ if made_of is None else (fused_or_plain, (made_of,))


copyreg.pickle(FusedType, _reduce)


@functools.cache
def _type_of_fused(kind):
    """FusedType, for classes that have a type of their own."""
    if kind is type:
        return FusedType
    made = type(f"Fused{kind.__name__}", (FusedType, kind), {})
    copyreg.pickle(made, _reduce)
    return made


@functools.cache
def fused_class(cls, part):
    """The subclass of cls whose forward is the part's. It has the name of cls: wrapping policies
    and device maps find modules by the names of their classes."""
    members = {
        "forward": part.forward(cls),
        "_qshard_made_of": cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return _type_of_fused(type(cls))(cls.__name__, (cls,), members)


def fused_or_plain(cls):
    """What pickles call."""
    know_activations()
    part, _ = find(cls)
    return cls if part is None else fused_class(cls, part)


def is_fused(module) -> bool:
    return isinstance(type(module), FusedType)
