"""Modules that are rotary embeddings."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qshard.fuse.part import Part, operands_of
from qshard.nn.rotary import rotate


@dataclass(frozen=True)
class Rotary(Part):
    """Modules whose `forward(x, cos, sin)`, x (batch, heads, positions, channels), cos and sin
    (positions, channels) with one angle for the two channels of a pair, turns pairs of channels
    half of them apart, by angles in float32. Fused they are one pass, in fp32 and rounded once.
    With tables of another dtype or shape the plain forward runs.

    keeps_dtype: the result has the dtype of x, whatever that of cos and sin; False: that to which
        these are promoted, and where that is not the dtype of x the plain forward runs.
    """

    operands: ClassVar[int] = 3
    keeps_dtype: bool = False

    def describe(self, module):
        return "rotary embedding"

    def forward(self, cls):
        plain, names, run = cls.forward, self.names(cls), self.run

        @functools.wraps(plain)
        def forward(self, *args, **kwargs):
            operands = operands_of(names, args, kwargs)
            y = None if operands is None else run(self, *operands)
            return plain(self, *args, **kwargs) if y is None else y

        return forward

    def run(self, module, x, cos, sin):
        if not all(isinstance(t, Tensor) for t in (x, cos, sin)) or x.dim() != 4:
            return None
        if not (x.dtype == torch.float32 or (self.keeps_dtype and x.is_floating_point())):
            return None
        if x.dtype == torch.float64 or any(t.dtype != torch.float32 for t in (cos, sin)):
            return None
        if any(t.shape != (x.shape[2], x.shape[3]) for t in (cos, sin)):
            return None
        return rotate(x, cos, sin, 2)
