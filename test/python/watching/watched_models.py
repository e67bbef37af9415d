"""Recorded operands of linears, and what a watch must say of them."""

import functools
import math
from dataclasses import asdict

import torch.nn.functional as F
from reference.statistics import statistics_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

EXACT = ("amax", "scale_min", "scale_max", "underflow", "saturated", "nonfinite")  # counts and maxima
SUMS = ("relative_error", "mse")  # of fp64 in another order


def assert_says(got, operands, code_dtype):
    """`got`: TensorStatistics; `operands`: as statistics_of takes them."""
    want, got = statistics_of(operands, code_dtype), asdict(got)
    for key in EXACT:
        assert got[key] == want[key] or math.isnan(got[key]) and math.isnan(want[key]), (key, got, want)
    for key in SUMS:
        assert math.isclose(got[key], want[key], rel_tol=1e-12), (key, got, want)
    assert math.isclose(got["snr_db"], want["snr_db"], rel_tol=1e-11), (got, want)  # of a logarithm near 0


WIDTH, HIDDEN = 112, 176  # of GEMMs that multiply codes: multiples of 16, and of no block of 32 or 128


class Block(nn.Module):
    def __init__(self, recompute=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH)
        self.recompute = recompute  # None, or use_reentrant of activation checkpointing

    def forward(self, x):
        return self.mlp(x) if self.recompute is None else checkpoint(self.mlp, x, use_reentrant=self.recompute)

    def mlp(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, recompute=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recorder:
    """Inputs and output gradients of the linears of a model, by the names of their weights, in order. `before_styles`:
    inputs as the hooks of tensor parallelism are given them."""

    def __init__(self, model, before_styles=False):
        self.inputs, self.gradients = {}, {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                of_weight = f"{name}.weight"
                module.register_forward_pre_hook(functools.partial(self.note_input, of_weight), prepend=before_styles)
                module.register_forward_hook(functools.partial(self.note_output, of_weight))

    def note_input(self, name, module, args):
        self.inputs.setdefault(name, []).append(self.matrix(args[0]))

    def note_output(self, name, module, args, output):
        if output.requires_grad:
            output.register_hook(lambda grad: self.gradients.setdefault(name, []).append(self.matrix(grad)))

    @staticmethod
    def matrix(tensor):
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return tensor.detach().reshape(-1, tensor.shape[-1]).cpu().clone()
