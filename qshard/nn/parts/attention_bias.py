"""Biases of attention scores."""

import math

import torch
from torch import Tensor

from qshard.nn.parts.arguments import check_choice
from qshard.nn.parts.attention_mask import offset_of, positions

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


def bias_of(
    bias_type: str,
    bias: Tensor | None,
    slopes: Tensor | None,
    sizes: tuple[int, int, int],
    diagonal: tuple,
    device,
) -> Tensor | None:
    """What broadcasts to (batch, heads, queries, keys), or None. `diagonal`: paddings and whether it
    ends at the bottom right, as for masks."""
    check_choice("DotProductAttention", "core_attention_bias_type", bias_type, BIAS_TYPES)
    if (bias is None) != (bias_type in ("no_bias", "alibi")):
        raise ValueError(
            f"qshard.nn.DotProductAttention: core_attention_bias_type={bias_type!r} "
            f"{'needs' if bias is None else 'takes no'} core_attention_bias"
        )
    if bias_type != "alibi":
        return bias
    (heads, queries, keys), (paddings, bottom_right) = sizes, diagonal
    distance = positions(queries, keys, device)
    if bottom_right:
        distance = distance + offset_of(paddings, queries, keys)
    return -distance.abs() * slopes.view(-1, heads, 1, 1)


def alibi_slopes(heads: int) -> Tensor:
    """(heads,) float32 slopes of ALiBi (arXiv:2108.12409): powers of 2^(-8/n) for the largest power of
    two n of heads, and every other one of twice as many for the rest."""
    n = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    slopes += [2 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)]
    return torch.tensor(slopes, dtype=torch.float32)
