"""Modules that are rotary embeddings."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qshard.fuse.part import Part, Reason, operands_of
from qshard.nn.rotary import rotate, turn_pair


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


@dataclass(frozen=True)
class RotaryPair(Part):
    """Modules whose `forward(query, key, positions=None)` turns both, (batch, positions, heads,
    channels), by rows of a table that they hold, and returns both. Fused they are one pass each, in
    fp32 and rounded once. With other tensors the plain forward runs.

    The table is of all positions: complex64 (positions or more, channels / 2), exp(i * angle) of
    pairs that are neighbours; or float32 (positions or more, 2 * channels), cosines beside sines,
    of pairs that are half of the channels apart. positions are its rows, (1 or batch, positions);
    None: the first ones.

    table: the attribute that holds it.
    """

    operands: ClassVar[int] = 2
    table: str = "cache"

    def describe(self, module):
        return "rotary embedding of queries and keys"

    def reason(self, module):
        if not isinstance(getattr(module, self.table, None), Tensor):
            return Reason(f"its {self.table} is no tensor")
        return None

    def forward(self, cls):
        plain, run = cls.forward, self.run

        @functools.wraps(plain)
        def forward(self, *args, **kwargs):
            is_usual = 2 <= len(args) <= 3 and kwargs.keys() <= {"positions"}
            y = run(self, *args, **kwargs) if is_usual and len(args) + len(kwargs) <= 3 else None
            return plain(self, *args, **kwargs) if y is None else y

        return forward

    def run(self, module, query, key, positions=None):
        table = getattr(module, self.table)
        given = (query, key, table) if positions is None else (query, key, table, positions)
        if not all(type(t) is Tensor for t in given):
            return None
        if table.dtype not in (torch.float32, torch.complex64):
            return None
        return turn_pair(query, key, table, positions)
