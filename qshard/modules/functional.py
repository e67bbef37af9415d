"""Quantized linears where the operator's own kernels are not asked: under torch.func's transforms, which take no
autograd function of C++, and of jagged tensors without autograd, which ask Python first."""

import torch
from torch.library import register_torch_dispatch
from torch.nested._internal.nested_tensor import NestedTensor

ops = torch.ops.qshard


@register_torch_dispatch("qshard::linear", NestedTensor)
def linear_of_jagged(cls, func, types, args, kwargs=None):
    """The kernel of nested tensors (ops/linear/nested_linear.cpp), which autograd would have come to by itself."""
    return func._op_dk(torch._C.DispatchKey.NestedTensorCPU, *args, **(kwargs or {}))


def linear_under_transforms(input, weight, bias, weight_only, format):
    """qshard.nn.Linear within grad, vjp and vmap over inputs. Gradients of gradients, forward mode
    and vmap over weights are errors."""
    device = input.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
    output = Linear.apply(input, Quantized.apply(weight, format), weight_only)
    return output if bias is None else output + bias


class Quantized(torch.autograd.Function):
    """What is plain is quantized for this use; rounding passes the gradient straight through."""

    @staticmethod
    def forward(weight, format):
        return weight.detach() if ops.is_quantized(weight) else ops.quantize(weight, format)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, None

    @staticmethod
    def vmap(info, in_dims, weight, format):
        refuse_batched(in_dims[0])
        return Quantized.apply(weight, format), None


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(input, weight, weight_only):
        return ops.linear_forward(input, weight, None, False, weight_only)[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, weight, ctx.weight_only = inputs
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, _ = ctx.needs_input_grad
        grads = LinearBackward.apply(
            grad, weight, input if needs_weight else grad, needs_input, needs_weight, ctx.weight_only
        )
        return grads[0] if needs_input else None, grads[1] if needs_weight else None, None

    @staticmethod
    def vmap(info, in_dims, input, weight, weight_only):
        refuse_batched(in_dims[1])
        return Linear.apply(input.movedim(in_dims[0], 0), weight, weight_only), 0

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "qshard.nn.Linear: forward-mode differentiation is not supported for quantized weights"
        )


class LinearBackward(torch.autograd.Function):
    @staticmethod
    def forward(grad, weight, input, needs_input, needs_weight, weight_only):
        return ops.linear_backward(
            grad, weight, input, False, needs_input, needs_weight, weight_only
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "qshard.nn.Linear: double backward is not supported for quantized weights"
        )

    @staticmethod
    def vmap(info, in_dims, *args):
        raise NotImplementedError(
            "qshard.nn.Linear: gradients of a quantized linear under vmap (per-sample gradients) are "
            "not supported; compute them one after the other"
        )


def refuse_batched(dim):
    if dim is not None:
        raise NotImplementedError(
            "qshard.nn.Linear: vmap over weights is not supported for quantized linears; "
            "torch.func.stack_module_state needs plain ones (qshard.dequantize_)"
        )
