"""What calling a module does."""

from torch import nn
from torch.nn.modules import module as torch_module

_CALL = nn.Module.__call__


def runs_as_steps(cls):
    """A class whose forward other code of qshard replaces by steps of its own, or calls with arguments of
    its own: notes the function, which subclasses and patches may replace."""
    cls._own_forward = staticmethod(cls.forward)
    return cls


def does_forward_alone(module: nn.Module, hooks: int = 0) -> bool:
    """Whether calling a module runs the forward that qshard wrote for its class, and nothing else: no forward
    of a subclass, an object or a patch, and no hooks of any kind, its own or global. Compiled by .compile(),
    it is still that forward. A module of another library is never known.

    hooks: how many forward and forward-pre hooks of its own are known to the caller."""
    own = getattr(type(module), "_own_forward", None)
    return own is not None and runs(module, own, hooks) and not _has_global_hooks()


def runs(module: nn.Module, forward, hooks: int = 0) -> bool:
    """Whether calling a module runs this function, its class's forward, and nothing else but global hooks.

    hooks: how many forward and forward-pre hooks of its own are known to the caller."""
    cls = type(module)
    if cls.forward is not forward or cls.__call__ is not _CALL:
        return False
    of_module = module.__dict__.get("forward")
    if of_module is not None and getattr(of_module, "__func__", None) is not forward:
        return False
    if module._backward_hooks or module._backward_pre_hooks:
        return False
    return count_hooks(module) == hooks


def count_hooks(module: nn.Module) -> int:
    """Hooks of a module's own forward, and those before it."""
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


def _has_global_hooks():
    return bool(
        torch_module._global_forward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_backward_pre_hooks
        or torch_module._global_backward_hooks
    )
