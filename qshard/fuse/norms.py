"""Norms over the last dimension."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from qshard.fuse.part import Part, Reason, operands_of
from qshard.nn.parts.autocast import autocast_dtype
from qshard.nn.parts.multiply import are_plain
from qshard.nn.parts.norms import normalize
from qshard.tensor_parallel.norms import norm_of_tokens

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Norm(Part):
    """Modules that compute `x / sqrt(mean(x^2) + eps) * weight`, or of LayerNorm
    `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, over the last dimension, from
    `self.weight` and, if the module has one, `self.bias`, of one dimension. Fused they are
    computed in fp32 and rounded once, where modules in Python often round twice, and backward
    keeps x alone.

    kind: "RMSNorm" or "LayerNorm".
    eps: the attribute that holds eps, a float. It is read in each forward.
    zero_centered: times `1 + weight`, not `weight`.
    keeps_dtype: the result has the dtype of x; False: that to which x and weight are promoted.
    """

    kind: str = "RMSNorm"
    eps: str = "eps"
    zero_centered: bool = False
    keeps_dtype: bool = False

    def __post_init__(self):
        if self.kind not in ("RMSNorm", "LayerNorm"):
            raise ValueError(
                f'qshard.fuse.Norm: kind is "RMSNorm" or "LayerNorm", and not {self.kind!r}'
            )

    def describe(self, module):
        return f"{self.kind}, eps={getattr(module, self.eps)}"

    def reason(self, module):
        weight, eps = getattr(module, "weight", None), getattr(module, self.eps, None)
        if not isinstance(weight, Tensor) or weight.dim() != 1:
            return Reason("it has no weight of one dimension")
        if not isinstance(eps, float):
            return Reason(f"its {self.eps} is {eps}, and not a float")
        return None

    def forward(self, cls):
        plain, names, run = cls.forward, self.names(cls), self.run

        @functools.wraps(plain)
        def forward(self, *args, **kwargs):
            operands = operands_of(names, args, kwargs)
            y = None if operands is None else run(self, *operands)
            return plain(self, *args, **kwargs) if y is None else y

        return forward

    def run(self, module, x):
        eps, weight = getattr(module, self.eps), module.weight
        bias = getattr(module, "bias", None) if self.kind == "LayerNorm" else None
        if not isinstance(eps, float) or not self._takes(x, weight, bias):
            return None
        dtype = x.dtype if self.keeps_dtype else torch.promote_types(x.dtype, weight.dtype)

        def step(x, weight):
            return normalize(x, self.kind, weight, bias, eps, self.zero_centered, dtype)

        return norm_of_tokens(step, x, weight)

    def _takes(self, x, weight, bias):
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 1:
            return False
        if x.dim() == 0 or x.shape[-1] != weight.shape[0]:
            return False  # the plain forward broadcasts, or says what is wrong
        if bias is not None and not are_plain(x, weight, bias):
            return False
        return x.dtype in _DTYPES and weight.dtype in _DTYPES


@dataclass(frozen=True)
class TorchNorm(Norm):
    """torch's own, of one dimension, where its operator takes the dtypes and autocast leaves
    them."""

    keeps_dtype: bool = True

    def reason(self, module):
        if len(module.normalized_shape) != 1:
            return Reason(f"it normalizes over {len(module.normalized_shape)} dimensions")
        return super().reason(module)

    def _takes(self, x, weight, bias):
        if not super()._takes(x, weight, bias):
            return False
        if self.kind == "RMSNorm":
            return True
        # Autocast has a rule for LayerNorm alone, and mixed dtypes are an error on some devices.
        is_one_dtype = all(t is None or t.dtype == x.dtype for t in (weight, bias))
        return is_one_dtype and autocast_dtype(x) is None
