"""Which classes fuse_ knows: torch's, those that people register, and those of other packages."""

import sys
import weakref

from torch import nn as torch_nn

from qshard.fuse.experts import experts_part
from qshard.fuse.families import TORCH_PARTS, files_of, package_of, unknown_version
from qshard.fuse.norms import TorchNorm
from qshard.fuse.part import Part, Reason
from qshard.modules.packages import Package

_registered = weakref.WeakKeyDictionary(
    {getattr(torch_nn, name): part for name, part in TORCH_PARTS.items()}
)


def register(cls: type, part: Part) -> type:
    """Tells `fuse_` that modules of class `cls` compute what `part` says, one of
    `qshard.fuse.Norm`, `GatedMLP`, `PackedMLP`, `Rotary` and `RotaryPair`. Returns cls.

    This is said of exactly this class: subclasses are registered by themselves. It holds in this
    process, in place of what was known of the class before. The caller has to know that it is
    true: `fuse_` runs nothing to find out. A process in which the class is not registered reads
    pickles of fused modules as plain ones."""
    if not isinstance(cls, type) or not issubclass(cls, torch_nn.Module):
        raise TypeError(f"qshard.fuse.register: expected a class of modules, got {cls!r}")
    if hasattr(cls, "_qshard_made_of"):
        raise TypeError(
            f"qshard.fuse.register: {cls.__name__} is fused; register what it was made of"
        )
    if not isinstance(part, Part):
        raise TypeError(
            f"qshard.fuse.register: expected a part as qshard.fuse.Norm for {cls.__name__}, "
            f"got {part!r}"
        )
    part.names(cls)  # an error if its forward cannot be called so
    _registered[cls] = part
    return cls


def find(cls: type) -> tuple[Part | None, Reason | None]:
    """What is known of exactly this class, or why it is not used; (None, None) of an unknown
    one."""
    if cls in _registered:
        return _registered[cls], None
    experts = experts_part(cls)
    if experts != (None, None):
        return experts
    package, parts = family_of(cls)
    if cls.__name__ not in parts:
        return None, None
    part, file = parts[cls.__name__], vars(sys.modules[cls.__module__])
    if file.get(cls.__name__) is not cls:
        return None, None
    reason = unknown_version(package)
    if reason is None and not _has_known_forward(cls, part, package, file):
        text = f"{cls.__name__}.forward is not the one that {cls.__module__} defines"
        reason = Reason(text, warns=True)
    return (part, None) if reason is None else (None, reason)


def _has_known_forward(cls, part, package, file):
    if isinstance(part, TorchNorm) and cls.forward is getattr(torch_nn, part.kind).forward:
        return True
    return package.defines(cls.forward, file)


def family_of(cls: type) -> tuple[Package | None, dict[str, Part]]:
    """The package of a class, if fuse_ knows classes of its file, and these."""
    package = package_of(cls)
    parts = {} if package is None else files_of(package).get(cls.__module__, {})
    is_loaded = bool(parts) and cls.__module__ in sys.modules
    return (package, parts) if is_loaded else (None, {})


def known_base(cls: type) -> type | None:
    """The known class that a class is a subclass of, not itself known."""
    for base in cls.__mro__[1:]:
        if issubclass(base, torch_nn.Module) and any(found is not None for found in find(base)):
            return base
    return None
