"""Which layers are large enough for GEMMs of FP8 codes to take less time than those of bf16."""

from collections.abc import Callable, Iterator

from torch import nn as torch_nn

from qshard import recipes
from qshard._runtime.classes import Process
from qshard.experts.known import stack_names
from qshard.formats import info_of
from qshard.model.choosing import Choice, some, weight_names

# Rates of GEMMs with 4,096 to 14,336 features in a training step on an H200, whose clock its power limits, by the
# mode of scales (bench/results/2026-11-22-h200.md has the layers by themselves).
_BF16_FLOPS = 706e12
_FP8_FLOPS = {"tensor": 1332e12, "row": 1332e12, "128x128": 1123e12}
# Seconds by which each element costs more: of an input, and of a gradient, which is read for its amax first.
_OF_INPUTS, _OF_GRADIENTS = 0.95e-12, 1.43e-12
_LAUNCHES = 12e-6  # ten kernels of a forward and backward, where bf16 has three
_TOKENS_OF_WARNING = 8192  # quantize_ knows no batch


def large_enough(
    *,
    tokens: int,
    recipe="float8_tensorwise",
    filter_fn: Callable[[torch_nn.Module, str], bool] | None = None,
) -> Callable[[torch_nn.Module, str], bool]:
    """A `filter_fn` for `quantize_`: takes layers whose forward and backward take less time in FP8 than in bf16.

    >>> large = qshard.large_enough(tokens=8192, recipe="float8_blockwise")
    >>> qshard.quantize_(model, "float8_blockwise", filter_fn=large)

    A layer saves time in its GEMMs, in proportion to tokens x in x out features, and pays for quantizing its input and
    its gradient, tokens x (in + out), and for seven more kernels. Square layers gain from 970 features on at 8,192
    tokens and from 1,550 at 2,048, with a scale per tensor or row; in 128x128 blocks from 1,160 and 1,790. These bounds
    are computed from rates that were measured on one H200. Another GPU has others; a scale per row counts as one per
    tensor, and was not measured by itself.

    tokens: rows of a layer's input in one forward on one GPU, batch x sequence length. For experts the rows of all.
    recipe: what quantize_ is given, or its format's name; of a scale per tensor or row, or of 128x128 blocks.
    filter_fn(module, name): asked first; what it leaves out stays plain.

    A module with several weights is taken if they gain together, and a DTensor counts by its whole shape. The rule
    counts time alone: a narrow layer that is quantized takes less memory, too, and fewer bytes in a gather. As any
    filter_fn it is asked of heads that are tied to embeddings.

    Raises ValueError for less than one token, and for a recipe whose GEMMs are not in FP8; TypeError for a filter_fn
    that is no function.

    Source: torchao has such rules as filter functions for its recipes, by in and out features
    (torchao/float8/float8_linear_utils.py: _auto_filter_for_recipe).
    """
    name = "qshard.large_enough"
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"{name}: tokens must be a number of rows, 1 or more, got {tokens!r}")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"{name}: filter_fn must be a function of (module, name), got {type(filter_fn).__name__}")
    format = recipes.recipe_of(recipe, name).format
    rate = _rate(format)
    if rate is None:
        raise ValueError(
            f"{name}: {format} has no FP8 GEMM whose rate was measured; give a recipe of one scale per tensor or "
            "row, or of 128x128 blocks, or a filter_fn of your own"
        )
    return _LargeEnough(tokens, rate, filter_fn)


class _LargeEnough:
    def __init__(self, tokens, rate, filter_fn):
        self.tokens, self.rate, self.filter_fn = tokens, rate, filter_fn

    def __call__(self, module: torch_nn.Module, name: str) -> bool:
        if self.filter_fn is not None and not self.filter_fn(module, name):
            return False
        return seconds_saved(module, self.tokens, self.rate) > 0


def _rate(format: str) -> float | None:
    gemm = info_of(format).gemm
    return _FP8_FLOPS.get(gemm.scale_mode) if gemm.kind == "packed" else None


def seconds_saved(module: torch_nn.Module, tokens: int, rate: float) -> float:
    """By FP8 GEMMs of `rate`, in a forward and backward of a module; 0 without weights."""
    saved = 0.0
    for name in dict.fromkeys((*weight_names(module), *stack_names(module))):
        parameter = module._parameters.get(name)
        if parameter is None or parameter.dim() < 2:  # one that a wrapper has flattened
            continue
        rows, columns = parameter.shape[-2:]
        saved += 6 * tokens * rows * columns * (1 / _BF16_FLOPS - 1 / rate)
        saved -= tokens * (_OF_INPUTS * columns + _OF_GRADIENTS * rows) + _LAUNCHES
    return saved


def said_of_narrow_layers(choice: Choice, format: str) -> Iterator[str]:
    """What quantize_ says of a model that is about to run on a GPU in FP8, if more than half of its linears would take
    longer there. Weights on a CPU or on meta say nothing of the device that they will be on."""
    rate = _rate(format)
    if rate is None or recipes.is_emulated(format) or isinstance(choice.filter_fn, _LargeEnough):
        return
    here = [(name, module) for name, module in choice.linears if _multiplies_here(module, format)]
    narrow = [name for name, module in here if seconds_saved(module, _TOKENS_OF_WARNING, rate) < 0]
    if 2 * len(narrow) > len(here):
        yield (
            f"{len(narrow)} of {len(here)} linears ({some(narrow)}) are too narrow to take less time in FP8 at "
            f"{_TOKENS_OF_WARNING:,} tokens, by rates of an H200; filter_fn=qshard.large_enough(tokens=...) leaves "
            "such layers plain, if time is why they are quantized"
        )


def _multiplies_here(module, format):
    """Whether its weights lie on a GPU that multiplies codes of the format."""
    base = info_of(format).base
    parameters = [module._parameters.get(name) for name in weight_names(module)]
    devices = {parameter.device for parameter in parameters if parameter is not None}
    return bool(devices) and all(
        device.type == "cuda" and not Process.why_dequantized(device)[base] for device in devices
    )
