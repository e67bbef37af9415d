"""Clipping of gradients by their norm, left to the pass in which a fused optimizer reads them anyway."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.weak import TensorWeakRef

from qshard._runtime.hooks import local_of

# Those of torch's optimizers whose fused kernels divide by `grad_scale`, an attribute that torch's GradScaler sets.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_NAME = "qshard.clip_grad_norm_"


@dataclass
class _Pending:
    """A scale that the next step of an optimizer is to divide by."""

    scale: Tensor
    gradients: list[tuple[TensorWeakRef, int]]  # and their version counters, when the norm was taken


_pending: "weakref.WeakKeyDictionary[torch.optim.Optimizer, _Pending]" = weakref.WeakKeyDictionary()
_watched: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    optimizer: torch.optim.Optimizer,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_`, without a pass of its own: the
    next `optimizer.step()` divides each gradient by max(1, (norm + 1e-6) / max_norm) while it reads it.

    >>> qshard.clip_grad_norm_(model.parameters(), 1.0, optimizer)      # after backward, before step
    >>> optimizer.step()

    Returns the norm before clipping: one element, a plain tensor on the first gradient's device. DTensors have one norm
    over all ranks of their meshes, and the call is then a collective.

    parameters: plain, quantized or DTensors on one mesh or several; those without a gradient are skipped.
    optimizer: what steps them. torch's Adam, AdamW and SGD with fused=True divide as they read, if `parameters` are
        all that have gradients there. For another optimizer, or some of its parameters, this function multiplies
        gradients in place, as torch does.
    norm_type, error_if_nonfinite, foreach: as of torch's function.

    Until the step `.grad` holds unclipped gradients; a fused step leaves the clipped ones there. A second call before
    the step clips what the first one leaves. The scale is for one step, and for the gradients whose norm was taken: a
    step after others were written or assigned is a RuntimeError. With a GradScaler, call
    `scaler.unscale_(optimizer)` before, as for torch's function.

    Bits: where the norm is below max_norm, a step's are those without clipping. Else they are those of g / s in fp32,
    where torch rounds 1 / s and then g * (1 / s) to the gradient's dtype: the last bits differ.

    Raises TypeError for an optimizer that is none; ValueError for a negative max_norm, for parameters with gradients
    that the optimizer does not hold, and for a `grad_scale` that something else gave it; RuntimeError for a norm that
    is not finite, if asked to. Nothing is changed then.

    Sources: torch/nn/utils/clip_grad.py; torch/optim/adam.py and torch/amp/grad_scaler.py of `grad_scale`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{_NAME}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    max_norm = float(max_norm)
    if not max_norm >= 0:
        raise ValueError(f"{_NAME}: max_norm must not be negative, got {max_norm}")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    clipped = [parameter for parameter in parameters if parameter.grad is not None]
    held = _with_gradients(optimizer)
    _check_held(clipped, held)
    if not clipped:
        return torch.tensor(0.0)
    pending = _current(optimizer)

    norm = _total_norm(clipped, norm_type, foreach)
    if pending is not None:
        norm = norm / pending.scale.to(norm.device)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"{_NAME}: the total norm of order {norm_type} is {norm.item()}, so gradients cannot be clipped; "
            "error_if_nonfinite=False clips them anyway"
        )
    if _divides_by_scale(optimizer) and {id(p) for p in held} == {id(p) for p in clipped}:
        scale = ((norm.float() + 1e-6) / max_norm).clamp(min=1.0)
        _leave_to_step(optimizer, scale if pending is None else scale * pending.scale, held)
        return norm
    if pending is not None:  # what a call before left to the step, for all that the optimizer holds
        for parameter in held:
            parameter.grad.div_(pending.scale.to(parameter.grad.device))
        _forget(optimizer)
    for some in _by_mesh(clipped):
        clip_grads_with_norm_(some, max_norm, norm, foreach)
    return norm


def _with_gradients(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _by_mesh(parameters):
    """Lists of those whose gradients are DTensors of one mesh, or plain: torch's lists hold one kind only."""
    of_mesh = {}
    for parameter in parameters:
        mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
        of_mesh.setdefault(mesh, []).append(parameter)
    return list(of_mesh.values())


def _check_held(clipped, held):
    known = {id(parameter) for parameter in held}
    for number, parameter in enumerate(clipped):
        if id(parameter) not in known:
            raise ValueError(
                f"{_NAME}: the optimizer does not hold parameter {number} of those with a gradient, of shape "
                f"{tuple(parameter.shape)}; give the parameters that it steps"
            )


def _total_norm(parameters, norm_type, foreach):
    """torch's, and that of the norms of several meshes."""
    norms = []
    for some in _by_mesh(parameters):
        norm = get_total_norm([parameter.grad for parameter in some], norm_type, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms])
    return torch.linalg.vector_norm(stacked, float(norm_type))


def _divides_by_scale(optimizer):
    """Whether its step is one of torch's own that is fused for all of its parameters."""
    step = type(optimizer).step
    is_known = any(step is kind.step for kind in _FUSED)
    return is_known and all(group["fused"] for group in optimizer.param_groups)


# ------------------------------------------------------------------------------ until the step


def _leave_to_step(optimizer, scale, held):
    if optimizer not in _watched:
        optimizer.register_step_pre_hook(_check_before_step)
        optimizer.register_step_post_hook(_forget_after_step)
        _watched.add(optimizer)
    _pending[optimizer] = _Pending(scale, _seen(held))
    optimizer.grad_scale = scale


def _seen(held):
    gradients = [local_of(parameter.grad) for parameter in held]
    return [(TensorWeakRef(gradient), gradient._version) for gradient in gradients]


def _is_seen(optimizer, pending):
    gradients = [local_of(parameter.grad) for parameter in _with_gradients(optimizer)]
    return len(gradients) == len(pending.gradients) and all(
        seen() is gradient and version == gradient._version
        for gradient, (seen, version) in zip(gradients, pending.gradients)
    )


def _current(optimizer):
    """The scale of a call before, if it still awaits the step; gradients of another backward have none."""
    pending = _pending.get(optimizer)
    given = vars(optimizer).get("grad_scale")
    if given is not None and (pending is None or given is not pending.scale):
        raise ValueError(
            f"{_NAME}: the optimizer has a grad_scale that this function did not set; delete it, or clip by "
            "torch.nn.utils.clip_grad_norm_"
        )
    if pending is not None and (given is None or not _is_seen(optimizer, pending)):
        _forget(optimizer)
        return None
    return pending


def _forget(optimizer):
    pending = _pending.pop(optimizer, None)
    if pending is not None and vars(optimizer).get("grad_scale") is pending.scale:
        del optimizer.grad_scale


@torch._disable_dynamo
def _check_before_step(optimizer, args, kwargs):
    pending = _pending.get(optimizer)
    if pending is None:
        return
    if vars(optimizer).get("grad_scale") is not pending.scale:  # the caller took it away
        _pending.pop(optimizer)
    elif not _is_seen(optimizer, pending):
        raise RuntimeError(
            f"{_NAME}: gradients were written or assigned after their norm was taken, so the scale is not theirs; "
            "call it again before the step, or leave them unclipped by `del optimizer.grad_scale`"
        )


@torch._disable_dynamo
def _forget_after_step(optimizer, args, kwargs):
    if "found_inf" in vars(optimizer):  # a GradScaler's step, which deletes both by itself
        _pending.pop(optimizer, None)
    else:
        _forget(optimizer)
