"""Normalizations, by TransformerEngine's formulas."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from qshard.nn.parts.autocast import activation_dtype
from qshard.nn.parts.multiply import are_plain
from qshard.nn.parts.recompute import gradients_of, recomputed

_ops = torch.ops.qshard


def normalize(
    x: Tensor,
    normalization: str,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """LayerNorm or RMSNorm over the last dimensions, those of `weight`; gamma is weight, or 1 + weight
    if zero centered. Computed in fp32, rounded once, to `dtype`, else to that of activations.

    On CUDA devices, in eager mode and of plain tensors, by kernels of one pass each way: rows of at most
    32 KiB, their length a multiple of 8."""
    dtype = dtype or activation_dtype(x)
    step = functools.partial(
        _normalize,
        normalization=normalization,
        eps=eps,
        zero_centered_gamma=zero_centered_gamma,
        dtype=dtype,
    )
    x = x.to(dtype)
    if _takes_operator(x, weight, bias):
        return _Normalized.apply(step, x, weight, bias)
    if dtype != torch.float32 and (zero_centered_gamma or weight.dtype != dtype):
        return recomputed(step, x, weight, bias)  # fp32 copies are not kept
    return step(x, weight, bias)


def _takes_operator(x, weight, bias):
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and are_plain(x, weight, bias)
        and _ops._can_normalize(x, weight, bias)
    )


class _Normalized(torch.autograd.Function):
    """`step`, which _normalize is of, by qshard's kernels."""

    @staticmethod
    def forward(ctx, step, x, weight, bias):
        known = step.keywords
        is_rms = known["normalization"] == "RMSNorm"
        ctx.step = step
        y, statistics = _ops._normalize(
            x, weight, None if is_rms else bias, known["eps"], is_rms, known["zero_centered_gamma"]
        )
        ctx.save_for_backward(x, weight, bias, statistics)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, statistics = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # a graph of the gradients
            return None, *gradients_of(ctx.step, (x, weight, bias), needs, grad)
        is_zero_centered = ctx.step.keywords["zero_centered_gamma"]
        grads = _ops._normalize_backward(
            grad, x, weight, statistics, is_zero_centered, any(needs[1:])
        )
        return None, *(grad if needed else None for grad, needed in zip(grads, needs))


def _normalize(x, weight, bias, *, normalization, eps, zero_centered_gamma, dtype):
    if weight.dtype != dtype or (zero_centered_gamma and dtype != torch.float32):
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    gamma = weight + 1 if zero_centered_gamma else weight
    if normalization == "RMSNorm":
        return F.rms_norm(x, weight.shape, gamma, eps).to(dtype)
    return F.layer_norm(x, weight.shape, gamma, bias, eps).to(dtype)
