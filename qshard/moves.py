"""Modules that move, and change their dtype, with quantized weights."""

import copy

import torch
from _qshard_hooks import is_quantized, local_of
from torch.distributed.tensor import DTensor

ops = torch.ops.qshard
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def keep_quantized(fn):
    """`fn` of nn.Module._apply, such that what it makes of a quantized tensor is quantized."""

    def apply(tensor):
        result = fn(tensor)
        local, result_local = local_of(tensor), local_of(result)
        if not is_quantized(local) or is_quantized(result_local):
            return result
        if result.dtype not in _DTYPES:
            raise TypeError(
                f"qshard.nn.Linear: a quantized weight cannot become {result.dtype}; it can be "
                "float32, bfloat16 or float16, or plain, by qshard.dequantize_(model)"
            )
        copied = ops._copy_to(local.detach(), result.dtype, result.device)
        return copied if local is tensor else with_local(copied, tensor)

    return apply


def with_local(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor like another one, of another local tensor, of any dtype. (`DTensor.from_local` would
    take one that FSDP2 offloads to CPU to the mesh's device.)"""
    spec = copy.copy(like._spec)
    spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, spec, requires_grad=False)
