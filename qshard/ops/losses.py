"""The operators of a head with its loss; public as those of `qshard.ops`."""

from torch import Tensor

from qshard.ops.operator_calls import operator


@operator
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    format: str | None = None,
    weight_state: list[Tensor] | None = None,
    forward_precision: str | None = None,
) -> Tensor:
    """What `qshard.nn.linear_cross_entropy` calls, which says what the arguments are: the loss, float32 of no
    dimension.

    format: of the weight; compiled code and plain weights need it.
    weight_state: as of `linear`. In eager code a plain weight without one has an empty one.

    Autocast, autograd: as `linear`. Errors: as `qshard.nn.linear_cross_entropy`; DTensors have no rule here.
    """


@operator
def cross_entropy_and_gradient(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    grad_format: str | None = None,
    rows: bool = False,
    columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(losses, totals, rows, columns) of logits: what `linear_cross_entropy` runs below autograd after its linear.

    logits: float32, bfloat16 or float16 (..., words). target: int64 (...,), each a word or ignore_index.
    losses: float32 (...,), 0 where a target is ignored. totals: float32 (2,), their sum and how many targets are not
        ignored.
    rows, columns: the gradient of the sum of the losses, or (0,) if it is not asked for. With grad_format, of the
        weight that they meet, they are its codes for dgrad and for wgrad, uint8 of one dimension: `grad` and
        `grad_columns` of `linear_backward`, whose grad_scale is what the sum is multiplied by. Without grad_format
        rows is the gradient in the dtype of the logits, and there are no columns.

    The bits are the same on every device. One scale is that of an amax of 1, which no gradient exceeds; blocks have
    those of their own amaxes. Raises IndexError on the CPU for a target that is no word (CUDA devices give NaN),
    TypeError for dtypes, ValueError for a format whose gradients cannot be codes, RuntimeError for shapes that do not
    fit, and for codes where the device has no FP8 GEMM.
    """
