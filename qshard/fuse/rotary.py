"""Rotary embeddings: modules, and functions that a module's forward calls."""

import functools
import inspect
from dataclasses import dataclass

import torch

from qshard.fuse.classes import Rebuilt, is_known
from qshard.fuse.forwards import Step, plain_class
from qshard.fuse.probing import probe
from qshard.nn.rotary import rotate


class FusedRotary(Rebuilt):
    pattern = "rotary embedding"

    def forward(self, x, cos, sin):
        tables = (cos, sin)
        fits = x.dim() == 4 and all(t.dim() == 2 and t.dtype == torch.float32 for t in tables)
        if fits and all(t.shape == (x.shape[2], x.shape[3]) for t in tables):
            return rotate(x, cos, sin, 2)
        return super().forward(x, cos, sin)


@dataclass(frozen=True)
class RotaryFunction(Step):
    """A step of a forward: the function of this name of its file."""

    name: str

    @property
    def pattern(self):
        return f"rotary embedding, by {self.name}"

    def rewrites(self, module):
        return [(module, (self,))]

    def function(self, plain):
        return _fused_rotary_of(plain)


def _fused_rotary_of(function):
    @functools.wraps(function)
    def turn(q, k, cos, sin, *args, **kwargs):
        tensors = (q, k, cos, sin)
        fits = not args and not kwargs and all(type(t) is torch.Tensor for t in tensors)
        fits = fits and q.dim() == k.dim() == 4 and cos.shape == sin.shape == (1, *q.shape[2:])
        fits = fits and q.shape[2:] == k.shape[2:] and q.dtype == k.dtype
        if not fits or {torch.promote_types(q.dtype, t.dtype) for t in tensors} != {q.dtype}:
            return function(q, k, cos, sin, *args, **kwargs)
        cos, sin = cos[0].float(), sin[0].float()
        return rotate(q, cos, sin, 2), rotate(k, cos, sin, 2)

    return turn


def rotary_embedding(module):
    """{} for a rotary embedding. What is run to find out says by its arguments that it may be one."""
    if is_known(module) or any(map(list, (module.children(), module.parameters(), module.buffers()))):
        return None
    arguments = inspect.signature(type(module).forward).parameters
    if list(arguments)[-2:] != ["cos", "sin"] or len(arguments) != 4:
        return None
    x, cos, sin = _rotary_example()
    turned = (probe(module, training, x, cos, sin) for training in (True, False))
    return {} if all(_is_turned(y, x, cos, sin) for y in turned) else None


def rotary_steps(module):
    """The function of a rotary embedding that the module's forward calls: a list of one, or none."""
    forward = plain_class(module).forward
    if is_known(module) or not inspect.isfunction(forward) or hasattr(forward, "__wrapped__"):
        return []
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if inspect.isfunction(function) and _is_rotary_function(function):
            return [RotaryFunction(name)]
    return []


@functools.cache
@torch.no_grad()
def _is_rotary_function(function):
    """What is run to find out says by its arguments that it may be one."""
    arguments = list(inspect.signature(function).parameters.values())
    if [a.name for a in arguments[:4]] != ["q", "k", "cos", "sin"]:
        return False
    if any(a.default is a.empty and a.kind is not a.VAR_KEYWORD for a in arguments[4:]):
        return False
    q, cos, sin = _rotary_example()
    k = q[:, :1] + 1
    try:
        turned = function(q, k, cos[None], sin[None])
    except Exception:  # it is something else
        return False
    if not isinstance(turned, tuple) or len(turned) != 2:
        return False
    return _is_turned(turned[0], q, cos, sin) and _is_turned(turned[1], k, cos, sin)


def _rotary_example():
    """x (batch, heads, positions, channels), cos and sin (positions, channels)."""
    x = torch.linspace(-1, 2, 2 * 3 * 5 * 8, device="cpu").view(2, 3, 5, 8)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03], device="cpu")
    angles = torch.outer(torch.arange(5.0, device="cpu"), frequencies).repeat(1, 2)
    return x, angles.cos(), angles.sin()


def _is_turned(y, x, cos, sin):
    if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return False
    return torch.allclose(y, rotate(x, cos, sin, 2), rtol=1e-5, atol=1e-6)
