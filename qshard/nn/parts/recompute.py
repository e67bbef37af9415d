"""Steps that keep their inputs alone, and compute in backward again what else they need."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qshard.nn.parts.arguments import RngFork


def checkpointed(function: Callable, *args, fork: RngFork | None = None):
    """function(*args), by torch's checkpoint. fork: what function draws random numbers in. Without a
    graph, and under torch.func's transforms, which take no checkpoint, function as it is."""
    is_compiling = torch.compiler.is_compiling()
    transforms = not is_compiling and torch._C._are_functorch_transforms_active()
    if transforms or not torch.is_grad_enabled():
        return function(*args)
    # Compiled checkpoints take no contexts of Python's.
    options = {} if fork is None or is_compiling else {"context_fn": fork.contexts}
    return checkpoint(function, *args, use_reentrant=False, **options)


def recomputed(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """function(*tensors), of elementwise steps. Compiled code and torch.func's transforms run it as it is:
    the compiler decides by itself what to keep."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function(*tensors)
    return _Recomputed.apply(function, *tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *tensors):
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx, grad):
        return None, *gradients_of(ctx.function, ctx.saved_tensors, ctx.needs_input_grad[1:], grad)


def gradients_of(function, tensors, needs, grad):
    """In a backward: of what is needed of function(*tensors), which is computed again; None of the others.
    With a graph of their own, if that is asked for."""
    create_graph = torch.is_grad_enabled()
    tensors = list(tensors)
    if not create_graph:
        for i, needed in enumerate(needs):
            tensors[i] = tensors[i].detach().requires_grad_() if needed else tensors[i]
    with torch.enable_grad():
        output = function(*tensors)
        wanted = [tensor for tensor, needed in zip(tensors, needs) if needed]
        grads = iter(torch.autograd.grad(output, wanted, grad, create_graph=create_graph))
    return [next(grads) if needed else None for needed in needs]
