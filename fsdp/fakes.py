"""Fake implementations whose output shape depends on the format, and flop formulas.

FakeTensor describes a quantized tensor as a plain strided one of its nominal dtype; the number of
scales is not visible there.
"""

import torch
from torch.library import get_ctx, register_fake


@register_fake("qshard::codes")
def codes(self):
    row_bytes = (self.shape[-1] + 15) // 16 * 16
    strides = [1]
    for size in reversed(self.shape[1:]):
        strides.append(row_bytes if len(strides) == 1 else strides[-1] * size)
    return torch.empty_strided(
        self.shape, strides[::-1], dtype=torch.float8_e4m3fn, device=self.device
    )


@register_fake("qshard::columnwise_codes")
def columnwise_codes(self):
    return codes(self)


@register_fake("qshard::columnwise_scale_inv")
def columnwise_scale_inv(self):
    *leading, rows, cols = self.shape
    return torch.empty(
        [*leading, rows // 32, cols], dtype=torch.float8_e8m0fnu, device=self.device
    )


@register_fake("qshard::scale_inv")
def scale_inv(self):
    context = get_ctx()
    leading = list(self.shape[:-2])
    return torch.empty(
        [*leading, context.new_dynamic_size(), context.new_dynamic_size()],
        dtype=torch.float32,
        device=self.device,
    )


@register_fake("qshard::tensor_scale_inv")
def tensor_scale_inv(self):
    return torch.empty([*self.shape[:-2], 1, 1], dtype=torch.float32, device=self.device)


@register_fake("qshard::master")
def master(self):
    return torch.empty_like(self)


def register_flop_formulas():
    from torch.utils.flop_counter import register_flop_formula

    @register_flop_formula(
        [torch.ops.qshard.linear, torch.ops.qshard.linear_forward], get_raw=True
    )
    def linear_flops(input, weight, *args, out_val=None, **kwargs):
        return 2 * input.numel() * weight.shape[0]

    @register_flop_formula(torch.ops.qshard.linear_backward, get_raw=True)
    def linear_backward_flops(
        grad, weight, input, quantized, needs_input, needs_weight, *args, **kwargs
    ):
        return 2 * grad.numel() * weight.shape[1] * (bool(needs_input) + bool(needs_weight))

    @register_flop_formula(torch.ops.qshard.linear_backward_accumulate, get_raw=True)
    def accumulate_flops(grad, weight, input, quantized, needs_input, weight_grad, *args, **kwargs):
        return linear_backward_flops(grad, weight, input, quantized, needs_input, True)


register_flop_formulas()
