"""Classes of fused modules: made at run time, subclasses of what the modules were."""

import functools

from torch import nn as torch_nn


class Rebuilt:
    """Copies and pickles of a class that was made at run time, by a function of the class before."""

    def __reduce_ex__(self, protocol):
        return _rebuild, self._qshard_made_of, self.__dict__.copy()


def _rebuild(make, *of):
    cls = make(*of)
    return cls.__new__(cls)


@functools.cache
def mixed(mixin, kind):
    """Of a module whose forward is the mixin's."""
    members = {"_qshard_made_of": (mixed, mixin, kind), "__module__": kind.__module__}
    return type(f"Fused{kind.__name__}", (mixin, kind), members)


def has_more(function):
    """Whether calling a module does more than its class says."""
    if not isinstance(function, torch_nn.Module):
        return False
    if "forward" in function.__dict__ or function._backward_hooks or function._backward_pre_hooks:
        return True
    return bool(function._forward_hooks or function._forward_pre_hooks)


def is_known(module):
    """Whether torch or qshard made it: it computes what its name says."""
    return type(module).__module__.startswith(("torch.nn.", "qshard.nn"))
