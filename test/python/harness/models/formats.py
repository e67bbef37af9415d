"""Recipes of all formats, and models of one format or several."""

from helpers import has_two_images
from torch import nn

import qshard

RECIPES = {
    recipe.format: recipe
    for recipe in (
        qshard.Float8CurrentScaling(),
        qshard.DelayedScaling(amax_history_len=3),  # fewer than the steps of a test
        qshard.Float8RowwiseScaling(),
        qshard.Float8BlockScaling(),
        qshard.MXFP8BlockScaling(),
        qshard.MXFP8BlockScaling(weight_block=(1, 32)),
        qshard.MXFP8BlockScaling(weight_block=(1, 32), gather="phase"),
        qshard.NVFP4BlockScaling(),
        qshard.NVFP4BlockScaling(disable_2d_quantization=True),
    )
}
FORMATS = tuple(format for format in RECIPES if format != "mxfp8_1x32[phase]")
DELAYED = "float8_delayed[history=3]"
# Models of several formats at once; each format is in one of them at least.
MIXES = {
    "mix-1": {
        "blocks.0.up": "float8_tensorwise",
        "blocks.0.down": DELAYED,
        "blocks.1.up": "mxfp8_1x32",
        "blocks.1.down": "nvfp4",
        "head": "mxfp8",
    },
    "mix-2": {
        "blocks.0.up": "nvfp4",
        "blocks.0.down": "float8_rowwise",
        "blocks.1.up": "float8_blockwise",
        "blocks.1.down": DELAYED,
        "head": "nvfp4_1x16",
    },
}


def format_of(format, name):
    """The format of a module or weight in a model of one format or a mix."""
    module = name.removesuffix(".weight")
    if has_two_images(format) and not module.endswith("up"):
        return "mxfp8"  # WIDTH rows do not fit
    return MIXES[format][module] if format in MIXES else format


def quantize_model(model, format, **kwargs):
    """qshard.quantize_ with one format or a mix."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for fmt in sorted({format_of(format, name) for name in linears}):
        chosen = lambda _, name, fmt=fmt: format_of(format, name) == fmt  # noqa: E731
        qshard.quantize_(model, RECIPES[fmt], filter_fn=chosen, **kwargs)
    return model


def recipe_of(fmt):
    return next(recipe for name, recipe in RECIPES.items() if name.split("[")[0] == fmt)
