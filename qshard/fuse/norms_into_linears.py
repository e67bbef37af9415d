"""Norms whose result nothing reads but linears, of the module that calls the norm or of another that it
gives the result to."""

from dataclasses import dataclass

import torch
from torch import nn as torch_nn
from torch.nn.modules import module as torch_module

from qshard.fuse.classes import has_more, is_known
from qshard.fuse.dataflow import Forward
from qshard.fuse.forwards import Rewritten, Step, name_of, plain_class, takes_steps, undecorated
from qshard.fuse.mlps import FusedMLP
from qshard.fuse.norms import FusedNorm
from qshard.fuse.projections import Projections
from qshard.nn.normed import linears_of_norm


@dataclass(frozen=True)
class NormIntoLinears(Step):
    """A step of a forward: the norm of this name, whose result goes to linears.

    reader: the child whose linears they are; "" for the module's own.
    """

    name: str
    reader: str
    linears: tuple[str, ...]

    @property
    def pattern(self):
        reader = f"{self.reader}." if self.reader else ""
        return f"{self.name} into {reader}{', '.join(self.linears)}"

    def rewrites(self, module):
        reader = module.get_submodule(self.reader)  # of "" the module itself
        steps = () if isinstance(reader, FusedMLP) else map(LinearOfNorm, self.linears)
        return [(module, (self,)), (reader, tuple(steps))]

    def attribute(self):
        name, reader_name, linears = self.name, self.reader, self.linears

        def normalize_or_project(self, x):
            norm = getattr(self, name)
            reader = getattr(self, reader_name) if reader_name else self
            is_watched = reader is not self and _is_watched(reader)
            projections = None if is_watched else _project(x, norm, reader, linears)
            return norm(x) if projections is None else projections

        return normalize_or_project


@dataclass(frozen=True)
class LinearOfNorm(Step):
    """A step of a forward: the linear of this name, which may have run with the norm that it reads."""

    name: str

    def attribute(self):
        name = self.name

        def output(self, x):
            return x.outputs[name] if isinstance(x, Projections) else getattr(self, name)(x)

        return output


def _project(x, norm, reader, linears):
    """What the reader takes in place of norm(x), or None where the norm runs by itself: where its call, or that
    of a linear, may be seen by others, or nothing is to be had. Asked at each call."""
    if not isinstance(norm, FusedNorm) or _is_watched(norm):
        return None
    known = norm._qshard_norm(x)
    if known is None:
        return None
    if isinstance(reader, FusedMLP):
        return reader._qshard_project(x, known, linears)
    if not isinstance(reader, Rewritten) or not all(hasattr(reader, name_of(n)) for n in linears):
        return None
    outputs = linears_of_norm(x, known, [getattr(reader, name) for name in linears])
    return None if outputs is None else Projections(x, dict(zip(linears, outputs)))


def _is_watched(module):
    """Whether calling a module does more than its forward."""
    if has_more(module) or module._compiled_call_impl is not None:
        return True
    return not torch.compiler.is_compiling() and bool(torch_module._has_any_global_hook())


# ----------------------------------------------------------------------------- recognition


def norm_steps(module) -> list[NormIntoLinears]:
    """Of norms and MLPs that are fused already."""
    forward = None if is_known(module) else undecorated(plain_class(module).forward)
    norms = [name for name, child in module.named_children() if isinstance(child, FusedNorm)]
    source = Forward.of(forward) if forward is not None and norms else None
    if source is None:
        return []
    steps = (_norm_into_linears(module, source, name) for name in norms)
    return [step for step in steps if step is not None]


def _norm_into_linears(module, source, name):
    call = source.call_of(name)
    uses = None if call is None else source.uses_of_value(call)
    if not uses or not _is_called_as_usual(module.get_submodule(name)):
        return None
    linears = source.called_with(uses, _linears(module))
    if linears:
        return NormIntoLinears(name, "", linears)
    reader = source.reader(uses)
    if reader is None:
        return None
    child, call, key = reader
    linears = _read_by(module._modules.get(child), call, key)
    return NormIntoLinears(name, child, linears) if linears else None


def _read_by(reader, call, key):
    """The linears of a module that alone read what a call gives it as an argument, none if others do."""
    if reader is None or not _is_called_as_usual(reader):
        return ()
    if isinstance(reader, FusedMLP):
        if "forward" in reader.__dict__:
            return ()
        is_alone = len(call.args) + len(call.keywords) == 1
        return tuple(reader._qshard_fused[part] for part in ("gate", "up")) if is_alone else ()
    if is_known(reader) or not takes_steps(reader):
        return ()
    source = Forward.of(plain_class(reader).forward)
    parameter = None if source is None else source.parameter(key)
    uses = None if parameter is None else source.uses_of_parameter(parameter)
    return source.called_with(uses, _linears(reader)) if uses else ()


def _linears(module):
    return {name for name, child in module.named_children() if isinstance(child, torch_nn.Linear)}


def _is_called_as_usual(module):
    return type(module).__call__ is torch_nn.Module.__call__
