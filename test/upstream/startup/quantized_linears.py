"""Makes every nn.Linear quantized as it is made: the parameter, or at each use ("dynamic")."""

import functools

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import qshard
from qshard import module_state

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def recipe_of(format):
    recipes = (
        qshard.Float8CurrentScaling(),
        qshard.DelayedScaling(),
        qshard.Float8BlockScaling(),
        qshard.MXFP8BlockScaling(),
        qshard.NVFP4BlockScaling(),
    )
    return next(recipe for recipe in recipes if recipe.format == format)


def install(format, weights):
    """`weights`: of `qshard.quantize_`; with "dynamic" roots of FSDP1 are prepared, too."""
    recipe, make = recipe_of(format), nn.Linear.__init__

    @functools.wraps(make)
    def make_quantized(self, *args, **kwargs):
        make(self, *args, **kwargs)
        if type(self) is nn.Linear and self.weight.dtype in DTYPES and self.weight.numel():
            qshard.quantize_(self, recipe, weights=weights)

    nn.Linear.__init__ = make_quantized
    if weights == "dynamic":
        prepare_roots_of_fsdp1()


def prepare_roots_of_fsdp1():
    forward = FullyShardedDataParallel.forward

    @functools.wraps(forward)
    def prepare_and_forward(self, *args, **kwargs):
        # FSDP1 itself finds its root in the first forward, or state dict.
        is_new = self._is_root is not False and module_state.of(self).fsdp1 is None
        if is_new and any(True for _ in module_state.dynamics_of(self)):
            qshard.prepare_for_fsdp1(self)
        return forward(self, *args, **kwargs)

    FullyShardedDataParallel.forward = prepare_and_forward
