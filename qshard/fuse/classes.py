"""Classes of fused modules: made at run time, subclasses of what the modules were."""

import functools
import inspect
import types

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
    """Of a module whose forward is the mixin's, and takes what the class's takes by the same names."""
    members = {
        "forward": _with_names_of(mixin.forward, kind.forward),
        "_qshard_made_of": (mixed, mixin, kind),
        "__module__": kind.__module__,
    }
    return type(f"Fused{kind.__name__}", (mixin, kind), members)


def _with_names_of(forward, plain):
    """`forward`, with its parameters named as the first of `plain`'s."""
    code = forward.__code__
    count = code.co_argcount
    names = tuple(inspect.signature(plain).parameters)[:count]
    others = {*code.co_varnames[count:], *code.co_cellvars, *code.co_freevars}
    if len(names) < count or others.intersection(names):
        return forward
    code = code.replace(co_varnames=(*names, *code.co_varnames[count:]))
    return types.FunctionType(
        code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )


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
