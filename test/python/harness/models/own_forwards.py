"""A model whose modules read weights in ways of their own, beside a linear."""

import torch
import torch.nn.functional as F
from torch import nn

import qshard


class Bare(nn.Linear):
    """Multiplies as nn.Linear does."""


class Scaled(nn.Linear):
    """Has a forward of its own."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * 0.5


class Stack(nn.Module):
    """Has a parameter of its own, and biases that are a matrix, too."""

    def __init__(self):
        super().__init__()
        self.experts, self.bias = nn.Parameter(torch.randn(2, 32, 32)), nn.Parameter(torch.randn(2, 32))

    def forward(self, x):
        return x @ self.experts[0] + x @ self.experts[1]

    def extra_repr(self):
        return "experts=2"


class Matrix(nn.Module):
    """Shows nothing of itself."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return x @ self.matrix


CLASSES = (nn.Linear, Bare, Scaled, Stack, Matrix)
NAMES = ("weight", "weight", "weight", "experts", "matrix")  # each model's quantized parameter


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), Bare(32, 32), Scaled(32, 32), Stack(), Matrix())


def quantize(model, recipe="float8_blockwise", parameter_fn=lambda _, name: name.endswith(("experts", "matrix"))):
    return qshard.quantize_(model, recipe, parameter_fn=parameter_fn)


def write_plain(model, name):
    """As hooks of other libraries do, which know nothing of nn.Module's registration."""
    for module in model:
        if name in module._parameters:
            old = module._parameters[name]
            module._parameters[name] = nn.Parameter(torch.randn(old.shape), requires_grad=False)
