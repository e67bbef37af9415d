"""Linears whose forward multiplies the weight's values, and whose backward multiplies codes."""

import torch
from torch import Tensor
from torch.nn import functional as F

from qshard.nn.parts.autocast import activation_dtype

ops = torch.ops.qshard


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, format, weight_only):
        ctx.save_for_backward(input, weight)
        ctx.format, ctx.weight_only = format, weight_only
        ctx.bias_dtype = None if bias is None else bias.dtype
        bfloat16 = [None if t is None else t.to(torch.bfloat16) for t in (input, weight, bias)]
        with torch.autocast(input.device.type, enabled=False):  # which may be of another dtype
            return F.linear(*bfloat16).to(input.dtype)

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_input = grad_weight = grad_bias = None
        if needs_input or needs_weight:
            made = ops.linear_backward(
                grad, weight, input, False, needs_input, needs_weight,
                weight_only=ctx.weight_only, grad_dtype=weight.dtype, format=ctx.format, weight_state=[],
            )
            grad_input = made[0] if needs_input else None
            grad_weight = made[1] if needs_weight else None
        if needs_bias:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, format: str, weight_only: bool) -> Tensor:
    """input (..., K) times a plain weight (N, K), both rounded to bfloat16; (..., N) in the dtype that activations
    have. Backward is that of ops.linear with a weight of `format`, which is quantized then."""
    return _Linear.apply(input.to(activation_dtype(input)), weight, bias, format, weight_only)
