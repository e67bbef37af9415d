"""fuse_wgrad_accumulation: wgrad goes into the weight's `main_grad`, not to `.grad`.

The operators add wgrad to a leaf's `.grad` within the GEMM. They are given leaves of the same values, whose
`.grad` main_grad is.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qshard.nn.parts.autocast import activation_dtype


def into_main_grad(
    function: Callable[..., Tensor], x: Tensor, weights: Sequence[Tensor], overwrite: bool
) -> Tensor:
    """function(x, *weights), whose backward adds the gradients of the weights to their main_grad, or
    replaces what is there."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "qshard.nn: fuse_wgrad_accumulation is for eager mode; compiled backwards give .grad"
        )
    x = x.to(activation_dtype(x))
    trained = [weight for weight in weights if weight.requires_grad and torch.is_grad_enabled()]
    if not trained:
        return function(x, *weights)
    leaves = [_leaf(weight) if weight.requires_grad else weight for weight in weights]
    if x.requires_grad or any(map(_is_awaited, trained)):
        x = _After.apply(x, *trained)
    trained_leaves = [leaf for leaf in leaves if leaf.requires_grad]
    return _Before.apply(function(x, *leaves), overwrite, trained, trained_leaves)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in the dtype of x, whose wgrad has the dtype of weight.grad_dtype."""
    output = _PlainLinear.apply(x, weight)
    return output if bias is None else output + bias.to(output.dtype)


def _leaf(weight):
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.shape != weight.shape or not main_grad.is_contiguous():
        given = "none" if main_grad is None else f"one of shape {tuple(main_grad.shape)}"
        raise RuntimeError(
            "qshard.nn: fuse_wgrad_accumulation adds to weight.main_grad, a contiguous tensor of "
            f"the weight's shape {tuple(weight.shape)}; this weight has {given}"
        )
    leaf = weight.detach().requires_grad_()
    leaf.grad_dtype = main_grad.dtype
    leaf.grad = leaf.main_grad = main_grad
    return leaf


def _is_awaited(weight):
    """Wrappers that wait for the weight's gradient (Megatron's) mark weights that they want one of."""
    return hasattr(weight, "grad_added_to_main_grad")


class _Before(torch.autograd.Function):
    """The output; in backward, what comes before wgrad."""

    @staticmethod
    def forward(ctx, output, overwrite, weights, leaves):
        ctx.overwrite, ctx.weights, ctx.leaves = overwrite, weights, leaves
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        for weight in ctx.weights:
            if ctx.overwrite or getattr(weight, "overwrite_main_grad", False):
                weight.main_grad.zero_()
        if torch.is_grad_enabled():
            for leaf in ctx.leaves:
                leaf.register_post_accumulate_grad_hook(_write_back)
        return grad, None, None, None


def _write_back(leaf):
    """With create_graph=True autograd gives a leaf a new `.grad` in place of adding to the one that it has, which
    is main_grad."""
    main_grad = leaf.main_grad
    if leaf.grad is not main_grad:
        with torch.no_grad():
            main_grad.copy_(leaf.grad)
        leaf.grad = main_grad


class _After(torch.autograd.Function):
    """The input; in backward, what comes after wgrad."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.weights = weights
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.needs_input_grad[0] else None, *map(_dummy, ctx.weights)


def _dummy(weight):
    if not _is_awaited(weight):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


class _PlainLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        needs_input, needs_weight = ctx.needs_input_grad
        ctx.grad_dtype = weight.grad_dtype
        ctx.save_for_backward(x if needs_weight else None, weight if needs_input else None)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad
        grad_weight = None
        if needs_weight:
            dtype = torch.promote_types(x.dtype, ctx.grad_dtype)
            rows, columns = (t.reshape(-1, t.shape[-1]).to(dtype) for t in (grad, x))
            grad_weight = (rows.t() @ columns).to(ctx.grad_dtype)
        return grad @ weight.to(grad.dtype) if needs_input else None, grad_weight
