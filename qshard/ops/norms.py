"""The operator of a normalization and its linears; public as those of `qshard.ops`."""

from torch import Tensor

from qshard.ops.operator_calls import operator


@operator
def norm_linear(
    input: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor] | None = None,
    *,
    eps: float,
    rms: bool,
    zero_centered_gamma: bool = False,
    format: str | None = None,
    with_input: bool = False,
) -> list[Tensor]:
    """linear(norm(input), weight) by each of the weights: the values of these operators, one after the other,
    rounded where they round. On Hopper, with scales per tensor or in blocks of 128, norm(input) is quantized
    as it is made, in forward and again in backward, to the codes that the linears make of it: autograd keeps
    the input and 4 or 8 bytes a row, no codes and nothing normalized.

    input: (..., columns). norm_weight: (columns,), gamma; with zero_centered_gamma gamma is 1 + norm_weight.
    norm_bias: (columns,) or None; not of an RMSNorm.
    weights: (rows, columns) each, quantized. biases: (rows,) each, or None for no biases.
    eps, rms: RMSNorm, or else LayerNorm, over the last dimension, in fp32.
    format: as of `linear`.
    with_input: and, last, `input`, to add something to: that sum's gradient is added to the normalization's as
        this is written.

    Returns (..., rows) for each weight, in the dtype of `input`. No double backward. Raises RuntimeError for
    shapes or devices that do not go together.
    """
