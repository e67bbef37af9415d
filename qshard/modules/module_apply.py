"""Modules that move, and change their dtype, with quantized parameters.

nn.Module._apply, which `.to()`, `.float()`, `.to_empty()` and so on call, replaces parameters by what a
function makes of them, and of a quantized one that may be plain: untied, in a Parameter of its own. Which
modules have quantized parameters does not depend on their classes, so what is wrapped is the method itself.
"""

import functools

import torch
from torch.distributed.tensor import DTensor

from qshard._runtime.classes import Process, TensorState
from qshard._runtime.hooks import holds_codes, local_of
from qshard._runtime.patches import wrap
from qshard._runtime.placement import spec_of, with_local

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAME_ROWS = -1


class _KeepQuantized:
    """A function of nn.Module._apply, such that what it makes of a quantized tensor is quantized."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, tensor):
        local = local_of(tensor)
        if not holds_codes(local):
            return self.fn(tensor)
        Process.make_shards(_SAME_ROWS)  # by empty_like, for to_empty()
        try:
            result = self.fn(tensor)
        finally:
            Process.make_shards(None)
        result_local = local_of(result)
        if result is tensor:
            return result
        if not holds_codes(result_local):
            _check_dtype("a parameter", result.dtype)
            result_local = TensorState(local.detach()).copy_to(result.dtype, result.device)
            result = result_local if local is tensor else with_local(result_local, tensor)
        if result_local.shape == local.shape:
            TensorState(result_local.detach()).set_groups_of_moved(local.detach())
        return result


@wrap("torch.nn:Module._apply")
def _apply_to_quantized(stock):
    @functools.wraps(stock)
    def _apply(self, fn, recurse=True):
        if not isinstance(fn, _KeepQuantized) and not torch.compiler.is_compiling():
            quantized = _quantized_of(self, recurse)
            if quantized:
                _check(fn, quantized)
                fn = _KeepQuantized(fn)
        return stock(self, fn, recurse)

    return _apply


def _quantized_of(module, recurse):
    """{(dtype, device): name of the first parameter that is quantized}."""
    found = {}
    for name, parameter in module.named_parameters(recurse=recurse):
        local = local_of(parameter)
        if holds_codes(local):
            found.setdefault((local.dtype, local.device), name)
    return found


def _check(fn, quantized):
    """Raises before anything is changed: modules are changed one after the other."""
    for (dtype, device), name in quantized.items():
        try:
            with torch.no_grad():
                result = fn(torch.empty(0, dtype=dtype, device=device))
        except Exception:  # a function of certain tensors; what it does to these is seen then
            continue
        if isinstance(result, torch.Tensor):
            _check_dtype(name, result.dtype)


def _check_dtype(name, dtype):
    if dtype not in _DTYPES:
        raise TypeError(
            f"torch.nn.Module: {name} is quantized and cannot become {dtype}; it can be float32, bfloat16 "
            "or float16, or plain, by qshard.dequantize_(model)"
        )


def distributed(local: torch.Tensor, spec) -> DTensor:
    """A local tensor as a DTensor of a spec that is there, but for the dtype: as torch's to_local makes
    gradients, in a tenth of from_local's time."""
    return DTensor(local, spec_of(local, spec), requires_grad=False)
