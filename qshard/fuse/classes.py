"""Fused classes: made at run time, subclasses of the classes whose modules they take over."""

import functools

from qshard.fuse.registry import find
from qshard.modules.made_classes import made_class
from qshard.nn.parts.known_activations import know_activations


@functools.cache
def fused_class(cls, part):
    """The subclass of cls whose forward is the part's. A pickle names cls: where it is read, modules
    are fused again if that class is known there, and are plain modules if it is not."""
    return made_class(
        cls, (fused_or_plain, (cls,)), forward=part.forward(cls), _qshard_made_of=cls
    )


def fused_or_plain(cls):
    """What pickles call."""
    know_activations()
    part, _ = find(cls)
    return cls if part is None else fused_class(cls, part)


def is_fused(module) -> bool:
    return hasattr(type(module), "_qshard_made_of")
