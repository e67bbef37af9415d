"""fuse_wgrad_accumulation: a linear whose wgrad goes into the weight's `main_grad`, not to `.grad`."""

import torch
import torch.nn.functional as F

from qshard.nn.autocast import activation_dtype

ops = torch.ops.qshard


def linear_into_main_grad(x, weight, bias, multiply):
    """multiply(x, weight, bias), whose backward writes weight.main_grad."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "qshard.nn: fuse_wgrad_accumulation is for eager mode; compiled backwards give .grad"
        )
    x = x.to(activation_dtype(x))
    main_grad = None
    if weight.requires_grad and torch.is_grad_enabled():
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None or main_grad.shape != weight.shape or not main_grad.is_contiguous():
            given = "none" if main_grad is None else f"one of shape {tuple(main_grad.shape)}"
            raise RuntimeError(
                "qshard.nn: fuse_wgrad_accumulation adds to weight.main_grad, a contiguous tensor of "
                f"the weight's shape {tuple(weight.shape)}; this weight has {given}"
            )
    quantized = ops.is_quantized(weight)
    # What a quantized module computes by a plain weight is quantized at each use, and wgrad with it.
    used = weight if quantized or multiply.weight_format is None else _Quantize.apply(weight, multiply)
    output = _Linear.apply(x, used, weight, main_grad, multiply)
    return output if bias is None else output + bias.to(output.dtype)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, multiply):
        return ops.quantize(weight.detach(), multiply.weight_format)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Linear(torch.autograd.Function):
    """x @ used^T, whose wgrad goes into main_grad, the gradient of `weight`."""

    @staticmethod
    def forward(ctx, x, used, weight, main_grad, multiply):
        only = multiply.weight_only
        ctx.weight, ctx.main_grad, ctx.multiply = weight, main_grad, multiply
        # As other linears do: the codes that wgrad multiplies, where it does.
        is_quantized = ops.is_quantized(used)
        ctx.saves_codes = (
            is_quantized and main_grad is not None and ops._saves_input_codes(x, used, only)
        )
        if is_quantized:
            output, codes = ops.linear_forward(x, used, None, ctx.saves_codes, only)
        else:
            output, codes = F.linear(x, used.to(x.dtype)), None
        ctx.save_for_backward(codes if ctx.saves_codes else x, used)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, used = ctx.saved_tensors
        weight, main_grad, multiply = ctx.weight, ctx.main_grad, ctx.multiply
        needs_input = ctx.needs_input_grad[0]
        overwrite = multiply.overwrite or getattr(weight, "overwrite_main_grad", False)
        if main_grad is not None and overwrite:
            main_grad.zero_()
        if not ops.is_quantized(used):
            grad_input = grad @ used.to(grad.dtype) if needs_input else None
            if main_grad is not None:
                dtype = torch.promote_types(x.dtype, main_grad.dtype)
                rows, columns = (t.reshape(-1, t.shape[-1]).to(dtype) for t in (grad, x))
                main_grad.add_(rows.t() @ columns)
        elif main_grad is None:
            only = multiply.weight_only
            grad_input = ops.linear_backward(grad, used, x, False, needs_input, False, only)[0]
        else:
            grad_input = ops.linear_backward_accumulate(
                grad, used, x, ctx.saves_codes, needs_input, main_grad, multiply.weight_only
            )
        return (grad_input if needs_input else None), None, _dummy(weight, main_grad), None, None


def _dummy(weight, main_grad):
    """Wrappers that wait for the weight's gradient (Megatron's) mark weights that they want one of."""
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=weight.dtype, device=main_grad.device).expand(weight.shape)
