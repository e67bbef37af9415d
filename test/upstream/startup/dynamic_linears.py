"""Makes every nn.Linear quantize its weight at each use, and prepares FSDP1's roots."""

import functools

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import qshard

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


def install(format):
    recipe = recipe_of(format)
    make, forward = nn.Linear.__init__, FullyShardedDataParallel.forward

    @functools.wraps(make)
    def make_dynamic(self, *args, **kwargs):
        make(self, *args, **kwargs)
        if type(self) is nn.Linear and self.weight.dtype in DTYPES and self.weight.numel():
            qshard.quantize_(self, recipe, weights="dynamic")

    @functools.wraps(forward)
    def prepare_and_forward(self, *args, **kwargs):
        # FSDP1 itself finds its root in the first forward.
        is_new = self._is_root is None and "_qshard_fsdp1" not in self.__dict__
        if is_new and any(getattr(m, "dynamic", None) is not None for m in self.modules()):
            qshard.prepare_for_fsdp1(self)
        return forward(self, *args, **kwargs)

    nn.Linear.__init__ = make_dynamic
    FullyShardedDataParallel.forward = prepare_and_forward
