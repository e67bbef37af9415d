"""Normalizations, by TransformerEngine's formulas."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from qshard.nn.autocast import activation_dtype
from qshard.nn.recompute import recomputed


def normalize(
    x: Tensor,
    normalization: str,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """LayerNorm or RMSNorm over the last dimensions, those of `weight`; gamma is weight, or 1 + weight
    if zero centered. Computed in fp32, rounded once, to `dtype`, else to that of activations."""
    dtype = dtype or activation_dtype(x)
    step = functools.partial(
        _normalize,
        normalization=normalization,
        eps=eps,
        zero_centered_gamma=zero_centered_gamma,
        dtype=dtype,
    )
    x = x.to(dtype)
    if dtype != torch.float32 and (zero_centered_gamma or weight.dtype != dtype):
        return recomputed(step, x, weight, bias)  # fp32 copies are not kept
    return step(x, weight, bias)


def _normalize(x, weight, bias, *, normalization, eps, zero_centered_gamma, dtype):
    if weight.dtype != dtype or (zero_centered_gamma and dtype != torch.float32):
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    gamma = weight + 1 if zero_centered_gamma else weight
    if normalization == "RMSNorm":
        return F.rms_norm(x, weight.shape, gamma, eps).to(dtype)
    return F.layer_norm(x, weight.shape, gamma, bias, eps).to(dtype)
