"""Plain models with the arithmetic of quantized ones, which are the oracle for what FSDP2 must do."""

import torch
import torch.nn.functional as F
from helpers import has_two_images, shown_to_dgrad
from models.formats import format_of
from torch import nn

ops = torch.ops.qshard


class _Show(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, quantized):
        return ops.dequantize(quantized)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Shadow:
    """shadow(weight): what forward and backward would see of a plain weight if it were quantized;
    its gradient passes through. A new value is one that an optimizer step made."""

    def __init__(self, format):
        self.format = format
        self.quantized = None

    def __call__(self, weight):
        value = weight.detach()
        if self.quantized is None:
            self.quantized = ops.quantize(value, self.format, keep_master=True)
        elif not torch.equal(ops.master(self.quantized), value):
            self.quantized.copy_(value)
            flush_step([self.quantized])
        return _Show.apply(weight, self.quantized)


def flush_step(weights):
    """What follows an optimizer step on whole quantized weights, on one device."""
    ops._flush_after_step(weights, [0] * len(weights), [False] * len(weights), None)


class LinearOfTwoValues(torch.autograd.Function):
    """linear by one weight, with dgrad by another."""

    @staticmethod
    def forward(ctx, x, weight, dgrad_weight, bias):
        ctx.save_for_backward(x, dgrad_weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, dgrad_weight = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad
        return (
            grad @ dgrad_weight if needs_x else None,
            grad.t() @ x if needs_weight else None,
            None,
            grad.sum(0) if needs_bias else None,
        )


def plain_linear(format):
    """nn.Linear with a plain weight and the arithmetic of a quantized one on CPU: what stock FSDP2
    does with it is the oracle for what ours must do."""

    class PlainLinear(nn.Linear):
        shadow = None

        def forward(self, x):
            self.shadow = self.shadow or Shadow(format)
            weight = self.shadow(self.weight).to(x.dtype)
            if has_two_images(format):
                dgrad_weight = shown_to_dgrad(self.shadow.quantized).to(x.dtype)
                return LinearOfTwoValues.apply(x, weight, dgrad_weight, self.bias)
            return F.linear(x, weight, self.bias)

    return PlainLinear


def make_plain(model, format):
    """Gives a plain model's linears the arithmetic of quantized ones."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.__class__ = plain_linear(format_of(format, name))
    return model
