"""The operators of rotary position embeddings; public as those of `qshard.ops`."""

from torch import Tensor

from qshard.ops.operator_calls import operator


@operator
def rotary_embedding(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    dim: int = 1,
    *,
    interleaved: bool = False,
    inverse: bool = False,
    stride: list[int] | None = None,
) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) in one pass: of each pair (a, b) of the first channels
    a cos_a - b sin_a and b cos_b + a sin_b, in float32, each operation rounded, and then to the dtype.
    The same bits on every device. The other channels stay.

    input: float32, bfloat16 or float16, of four dimensions, the last its channels; any strides.
    cos, sin: contiguous float32 (positions or more, rotated channels), without gradients; or one such
    table for each sequence, (sequences, positions or more, rotated channels), the sequences being dimension 0 of
    the input, or 1 where positions are 0.
    dim: of the positions, 0, 1 or 2. interleaved: neighbouring channels are a pair, instead of those half
    of the rotated ones apart. inverse: by the transposed matrices. stride: of the result; else the input's
    where that is dense.

    Autograd keeps cos and sin alone; the gradient has the memory layout of the result. RuntimeError for
    what does not fit.
    """


@operator
def split_rotary_embedding(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: list[int],
    dim: int = 1,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of one projection, turned as by `rotary_embedding`, and its values, as tensors of
    their own (., ., groups * heads, channels), contiguous.

    input: (., ., groups * sum(heads), channels). heads: of queries, keys and values in a group, one after
    the other. dim: of the positions, 0 or 1. Others: as of rotary_embedding.

    Autograd keeps cos and sin alone; backward is join_rotary_embedding with the other `inverse`, whose one
    result the projection takes as it is. RuntimeError for what does not fit.
    """


@operator
def join_rotary_embedding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: list[int],
    dim: int = 1,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    """The transpose of `split_rotary_embedding` by angles of the other sign, which is its inverse: queries
    and keys (., ., groups * heads, channels), turned, and values, in one contiguous tensor (., .,
    groups * sum(heads), channels). Any strides of what is given. Arguments as there."""
