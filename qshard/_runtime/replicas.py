"""Quantized parameters under DistributedDataParallel: replicas hold the same weights and see other
activations, whose amaxes delayed scaling keeps in histories. Ranks agree on those in the flush after a
step, and on what qshard.watch counts. Loading the library installs this."""

import functools

import torch

from qshard._runtime.classes import TensorState
from qshard._runtime.hooks import holds_codes
from qshard._runtime.patches import wrap


def _states(module):
    """(name as of a buffer, tensor) of what the formats of quantized parameters remember."""
    for name, parameter in module.named_parameters():
        if holds_codes(parameter):
            for state, tensor in TensorState(parameter).scaling_state().items():
                yield f"{name}_{state}", tensor


DDP = "torch.nn.parallel.distributed:DistributedDataParallel"


@wrap(f"{DDP}.__init__")
def agree_over_replicas(stock):
    """DDP would put rank 0's histories, which are buffers, over those of the others before each forward,
    with what they have collected in the forwards since the last step. Now it copies them once, as it
    does parameters, and steps agree on them."""

    @functools.wraps(stock)
    def __init__(self, module, *args, **kwargs):
        names = {name for name, _ in _states(module)} if isinstance(module, torch.nn.Module) else ()
        if not names:
            stock(self, module, *args, **kwargs)
            if isinstance(module, torch.nn.Module):
                _set_replicas(self)
            return
        before = getattr(module, "_ddp_params_and_buffers_to_ignore", None)
        module._ddp_params_and_buffers_to_ignore = [*(before or ()), *sorted(names)]
        try:
            stock(self, module, *args, **kwargs)
        finally:
            if before is None:
                del module._ddp_params_and_buffers_to_ignore
            else:
                module._ddp_params_and_buffers_to_ignore = before
        if kwargs.get("init_sync", True):
            for _, tensor in _states(module):
                torch.distributed.broadcast(tensor, group=self.process_group, group_src=0)
        _set_replicas(self)

    return __init__


@wrap(f"{DDP}.__setstate__")
def remember_replicas(stock):
    """Copies of parameters know no replicas, as those of `ddp.module` have none; those of DDP itself do."""

    @functools.wraps(stock)
    def __setstate__(self, state):
        stock(self, state)
        _set_replicas(self)

    return __setstate__


def _set_replicas(ddp):
    group = ddp.process_group
    for parameter in ddp.module.parameters():
        if holds_codes(parameter):
            TensorState(parameter).set_replicas(group.group_name if group.size() > 1 else "")
    histories = [name for name, _ in _states(ddp.module) if name.endswith("_amax_history")]
    if histories:  # then the object has a hook of its own, which Join asks for
        ddp.join_hook = functools.partial(
            _refuse_to_join, histories[0].removesuffix("_amax_history")
        )


def _refuse_to_join(weight, **kwargs):
    """A rank that has joined takes no more steps, in which the others would wait for it."""
    raise NotImplementedError(
        f"qshard: {weight} has delayed scaling, whose histories all replicas agree on after each step, and "
        "DistributedDataParallel.join() lets some of them take fewer; give all ranks as many inputs, or use "
        "a recipe that keeps no histories"
    )

