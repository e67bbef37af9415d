"""Classes that are made at run time, as subclasses of the classes whose modules they take over."""

import copyreg
import functools
from collections.abc import Callable


class MadeType(type):
    """The type of made classes. A pickle names the call that made the class, and so the class that it
    was made of. All else is copied and pickled as that class itself says, by its `__getstate__` and the
    like."""


def _reduce(cls):
    made_by = vars(cls).get("_qshard_made_by")
    return cls.__qualname__ if made_by is None else made_by


copyreg.pickle(MadeType, _reduce)


@functools.cache
def _type_of_made(kind):
    """MadeType, for classes that have a type of their own."""
    if kind is type:
        return MadeType
    made = type(f"Made{kind.__name__}", (MadeType, kind), {})
    copyreg.pickle(made, _reduce)
    return made


def plain_forward(cls: type) -> Callable | None:
    """The forward that a class had before classes were made of it, also where FSDP2 made another of those."""
    members = (vars(c) for c in cls.__mro__ if "_qshard_made_by" not in vars(c))
    return next((found["forward"] for found in members if "forward" in found), None)


def made_class(cls: type, made_by, **members) -> type:
    """A subclass of cls that has the name of cls: wrapping policies and device maps find modules by the
    names of their classes.

    made_by: a function and its arguments, with which a pickle makes the class again."""
    members |= {
        "_qshard_made_by": made_by,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return _type_of_made(type(cls))(cls.__name__, (cls,), members)
