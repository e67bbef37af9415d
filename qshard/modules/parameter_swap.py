"""Gives a Parameter another representation, quantized or plain, and lets it stay the object that it is:
optimizers, EMA copies, tied modules and FSDP2 hold Parameters, not names."""

import copyreg
import functools
import sys
import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import swap_tensors


def outside_inference_mode(function):
    """Makes tensors that `function` puts into a model ordinary ones: those that are made under
    torch.inference_mode() cannot be trained afterwards."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        is_grad_enabled = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
            return function(*args, **kwargs)

    return call


def check_model(model: nn.Module, function: str) -> None:
    """Raises if a wrapper keeps this model's parameters in another form than Python objects."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise RuntimeError(
                f"{function}: DistributedDataParallel collects the gradients of the tensors it was "
                f"made of; call {function.split('.')[-1]} before DistributedDataParallel(model)"
            )
        if not isinstance(module, FSDPModule):
            continue
        # FSDP2's root flag is read if it is there (pytorch has no public name for it).
        replicate = _replicate_of(module)
        wrapper = fully_shard if replicate is None else replicate
        state = wrapper.state(module) if hasattr(wrapper, "state") else None
        if getattr(state, "_is_root", None) is not None:
            raise RuntimeError(
                f"{function}: this model has run a forward under {wrapper.__name__}(), and FSDP2 keeps "
                f"what it set up for its parameters then; call {function.split('.')[-1]} before the "
                "first forward"
            )


def _replicate_of(module):
    """FSDP2's replicate(), if that made this module."""
    made_by = sys.modules.get("torch.distributed._composable.replicate_with_fsdp")
    if made_by is None or not isinstance(module, getattr(made_by, "ReplicateModule", ())):
        return None
    return made_by.replicate


def check(param: nn.Parameter, name: str, function: str) -> None:
    """Raises if `replace` cannot do what it promises."""
    if isinstance(param, DTensor):
        return  # it stays itself, with another local tensor
    if weakref.getweakrefs(param):
        raise RuntimeError(
            f"{function}: a weak reference to {name} is kept (torch.compile keeps one, once the "
            "model ran: call torch._dynamo.reset() first), and takes it for the tensor that it was"
        )
    if param._use_count() > 1:
        raise RuntimeError(
            f"{function}: {name} is in use by the graph of an output that is still alive, or by a "
            f"DistributedDataParallel that holds this model; call {function.split('.')[-1]} before, "
            "or delete the output (`del loss`)"
        )


def replace(param: nn.Parameter, value: torch.Tensor) -> None:
    """`value`, of the same shape, dtype and device, becomes what `param` is. Its class, hooks, gradient and
    attributes stay."""
    if isinstance(param, DTensor):
        param._local_tensor = value._local_tensor
        return
    # swap_tensors swaps classes and attributes, too. A user's class may construct in a way of its own.
    kind = type(param) if issubclass(type(param), nn.Parameter) else nn.Parameter
    new = torch.Tensor._make_subclass(kind, value, param.requires_grad)
    new.__dict__.update(param.__dict__)
    for slot in copyreg._slotnames(type(param)):
        if hasattr(param, slot):
            setattr(new, slot, getattr(param, slot))
    if param.grad is not None:
        if param.grad_dtype != param.dtype:
            new.grad_dtype = param.grad_dtype
        new.grad = param.grad
    # A tensor's hooks are called by what is swapped, from dicts that are not.
    backward, accumulated = param._backward_hooks, param._post_accumulate_grad_hooks
    param._backward_hooks = param._post_accumulate_grad_hooks = None
    swap_tensors(param, new)
    param._backward_hooks, param._post_accumulate_grad_hooks = backward, accumulated
