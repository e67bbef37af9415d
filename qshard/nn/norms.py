"""Normalizations, by TransformerEngine's formulas."""

import torch
import torch.nn.functional as F
from torch import Tensor

from qshard.nn.autocast import activation_dtype


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
    x = x.to(dtype)
    if dtype != torch.float32 and (zero_centered_gamma or weight.dtype != dtype):
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    gamma = weight + 1 if zero_centered_gamma else weight
    if normalization == "RMSNorm":
        return F.rms_norm(x, weight.shape, gamma, eps).to(dtype)
    return F.layer_norm(x, weight.shape, gamma, bias, eps).to(dtype)
