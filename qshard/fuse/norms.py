"""RMSNorms of plain modules."""

import functools

import torch
from torch import nn as torch_nn

from qshard.fuse.classes import Rebuilt, is_known
from qshard.fuse.probing import in_both_modes, probe
from qshard.nn.autocast import activation_dtype
from qshard.nn.multiply import are_plain
from qshard.nn.norms import normalize
from qshard.tensor_parallel.norms import norm_of_tokens


class FusedNorm(Rebuilt):
    pattern = "RMSNorm, eps={eps}"

    def forward(self, x):
        known = self._qshard_fused
        eps = getattr(self, known["eps_name"])
        if not isinstance(eps, float):  # None of nn.RMSNorm's: that of the dtype
            return super().forward(x)
        dtype = self._qshard_dtype(x)

        def step(x, weight):
            return normalize(x, "RMSNorm", weight, None, eps, known["zero_centered"], dtype)

        return norm_of_tokens(step, x, self.weight)

    def _qshard_dtype(self, x):
        """Of the result."""
        keeps = self._qshard_fused["keeps_dtype"]
        return x.dtype if keeps else torch.promote_types(x.dtype, self.weight.dtype)

    def _qshard_norm(self, x):
        """What `normalize` takes after x, where modules of a norm and linears compute the same of it; else
        None."""
        known = self._qshard_fused
        eps = getattr(self, known["eps_name"])
        if not isinstance(eps, float) or not are_plain(x, self.weight):
            return None
        if not x.dtype == self._qshard_dtype(x) == activation_dtype(x):
            return None
        return "RMSNorm", self.weight, None, eps, known["zero_centered"]


def rms_norm(module):
    """eps and the attribute that holds it, whether gamma is 1 + weight, and whether the result has the
    input's dtype."""
    if type(module) is torch_nn.RMSNorm:
        if not isinstance(module.eps, float) or module.weight is None or module.weight.dim() != 1:
            return None
        return {"eps": module.eps, "eps_name": "eps", "zero_centered": False, "keeps_dtype": True}
    if is_known(module):
        return None
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or module.weight.dim() != 1:
        return None
    if any(map(list, (module.buffers(), module.children()))):
        return None
    epsilons = {n: v for n, v in vars(module).items() if isinstance(v, float) and 0 < v < 0.1}
    if len(set(epsilons.values())) != 1:
        return None
    return in_both_modes(functools.partial(_rms_norm_by_values, module, epsilons))


def _rms_norm_by_values(module, epsilons, training):
    eps, size = next(iter(epsilons.values())), module.weight.shape[0]
    weight = torch.linspace(0.5, 1.5, size)
    # Rows to which eps means nothing, something, and everything.
    x = torch.linspace(-1, 2, size) * torch.tensor([[1.0], [eps**0.5], [1e-2 * eps**0.5]])
    run = functools.partial(probe, module, training, _parameters={"weight": weight})
    y = run(x)
    if y is None or y.shape != x.shape or y.dtype != torch.float32:
        return None
    changed = {name: run(x, **{name: 4 * eps}) for name in epsilons}
    read = [name for name, other in changed.items() if other is None or not torch.equal(other, y)]
    if len(read) != 1:
        return None
    for zero_centered in (False, True):
        expected = normalize(x, "RMSNorm", weight, None, eps, zero_centered)
        if torch.allclose(y, expected, rtol=1e-5, atol=0):
            low = run(x.bfloat16())
            keeps = low is not None and low.dtype == torch.bfloat16
            return {"eps": eps, "eps_name": read[0], "zero_centered": zero_centered, "keeps_dtype": keeps}
    return None
