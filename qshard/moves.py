"""Modules that move, and change their dtype, with quantized weights."""

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
        copy = ops._copy_to(local.detach(), result.dtype, result.device)
        return copy if local is tensor else with_local(copy, tensor)

    return apply


def with_local(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor like another one, of another local tensor."""
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
