"""The modules that tests train: a residual block, one with branches, one for tensor parallelism, one whose
linears engines fuse."""

import torch.nn.functional as F
from helpers import fit
from models.formats import format_of
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 100  # not a multiple of 16, nor of a block


class Block(nn.Module):
    """An MLP block: quantized weights, plain norm and bias in one FSDP group."""

    def __init__(self, rows, linear=nn.Linear, recompute=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = linear(WIDTH, rows, bias=False)
        self.down = linear(rows, WIDTH)
        self.recompute = recompute  # None, or use_reentrant of activation checkpointing

    def forward(self, x):
        if self.recompute is None:
            return self.mlp(x)
        return checkpoint(self.mlp, x, use_reentrant=self.recompute)

    def mlp(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """`format`: the rows of `up` are rounded up to what it can have."""

    def __init__(self, rows=257, linear=nn.Linear, recompute=None, format=None):
        super().__init__()
        fitted = [fit(format_of(format, f"blocks.{i}.up") if format else "", rows) for i in range(2)]
        self.blocks = nn.ModuleList(Block(n, linear, recompute) for n in fitted)
        self.head = linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Branches(Model):
    """A block, and a linear in the root's unit, that not every step uses."""

    def __init__(self, parts):
        super().__init__(33)
        self.other_head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.parts = parts

    def forward(self, x):
        part = self.parts.pop()
        x = self.blocks[0](x)
        x = self.blocks[1](x) if part > 0 else x
        return (self.other_head if part > 1 else self.head)(x)


class MLP(nn.Module):
    """`up` is cut by rows and `down` by columns, of `hidden` features."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class FusableBlock(nn.Module):
    """Rows that ranks share unevenly, and one of which most ranks have nothing."""

    def __init__(self, dim=48):
        super().__init__()
        self.q_proj = nn.Linear(dim, 100, bias=False)
        self.k_proj = nn.Linear(dim, 33)
        self.v_proj = nn.Linear(dim, 1, bias=False)
        self.gate_proj = nn.Linear(dim, 70)
        self.up_proj = nn.Linear(dim, 70)
        self.down_proj = nn.Linear(70, dim)

    def forward(self, x):
        y = self.q_proj(x).mean(-1, keepdim=True) * self.k_proj(x).mean(-1, keepdim=True)
        x = x + y * self.v_proj(x)
        return x + self.down_proj(self.gate_proj(x).sigmoid() * self.up_proj(x))
