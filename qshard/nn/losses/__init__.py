"""A head and its cross entropy as one step, whose gradient of the logits passes as codes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard import module_state

_head = torch.ops.qshard.linear_cross_entropy.default


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
    forward_precision: str | None = None,
) -> Tensor:
    """cross_entropy(linear(input, linear_weight, linear_bias), target), as torch 2.13's
    `torch.nn.functional.linear_cross_entropy`, with a quantized weight: float32, of no dimension.

    The gradient of the logits leaves the loss as the codes that dgrad and wgrad read, so it is never stored in 16 bits
    and no pass looks for its amax: before a mean divides it, it lies between -1 and 1. The logits are freed before
    this returns. So it is for formats with one scale per tensor or in blocks of 128, where the device multiplies them
    and the number of words is a multiple of 16. Elsewhere the gradient passes as values in the dtype of the logits.

    input: float32, bfloat16 or float16 (..., columns). linear_weight: (words, columns), perhaps an embedding's, too.
    target: int64 (...,). linear_bias: (words,).
    reduction: "mean" over the targets that are not ignore_index, or "sum".
    format: what a plain weight is quantized to, for this call. A quantized one tells by itself in eager code.
        In compiled code `LinearCrossEntropyLoss` takes plain weights, and this function quantized ones.
    forward_precision: "bf16" multiplies input and weight in bfloat16 in forward, a plain weight as it is. None
        multiplies codes, as backward always does.

    Log-sum-exps and losses are computed in float32, and have the same bits on every device for the same logits. With a
    mean of no token the loss is NaN and gradients are zeros, as torch has it. On CUDA devices a target that is no
    word gives NaN.

    Raises NotImplementedError for DTensors, ValueError for other reductions and for a plain weight without a format,
    TypeError for class probabilities, IndexError on the CPU for a target that is no word, RuntimeError for shapes that
    do not fit. No double backward.
    """
    _refuse_dtensors("qshard.nn.linear_cross_entropy", input, linear_weight, target, linear_bias)
    return _head(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        format=format,
        forward_precision=forward_precision,
    )


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` with the weight in `linear`, an nn.Linear, as torch 2.13's module of this name has it.
    `qshard.quantize_` quantizes that weight as any linear's. To tie it, assign it:
    `loss.linear.weight = embedding.weight`.

    in_features, num_classes, bias, device, dtype: of `linear`. reduction, ignore_index, label_smoothing,
    forward_precision: as of `linear_cross_entropy`.
    format: what a weight that stays plain is quantized to at each use. It is then gathered in full by FSDP2, and with
        forward_precision="bf16" the logits are those of a plain head. None leaves a plain weight plain: then this is
        torch's cross entropy of float32 logits.

    Under FSDP2 this module is in the group that gathers the weight: call `fully_shard` on it or on a module around
    it, and not on `linear`.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device=None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        format: str | None = None,
        forward_precision: str | None = None,
    ):
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.format, self.forward_precision = format, forward_precision

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: (..., in_features), target: int64 (...,). The loss, float32 of no dimension."""
        linear, how = self.linear, module_state.current(self.linear)
        options = {
            "reduction": self.reduction,
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
        }
        transforms = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        format = how.weight_format or self.format
        if format is None or how.weight_only or transforms:
            logits = linear(input).float()
            return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
        weight, precision = linear.weight, self.forward_precision
        _refuse_dtensors("qshard.nn.LinearCrossEntropyLoss", input, weight, target, linear.bias)
        state = [] if how.weight_format is None else None
        if how.dynamic is not None:
            how.dynamic.prepare(linear, weight)
            state, precision = how.dynamic.scaling, precision or how.dynamic.forward_precision
        return _head(
            input,
            weight,
            target,
            linear_bias=linear.bias,
            format=format,
            weight_state=state,
            forward_precision=precision,
            **options,
        )

    def extra_repr(self) -> str:
        shown = f"reduction={self.reduction!r}, format={self.format}, forward_precision={self.forward_precision}"
        return f"{shown}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"


def _refuse_dtensors(name, *tensors):
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            raise NotImplementedError(
                f"{name}: a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements}; under FSDP2 "
                "call it in the forward of the module that fully_shard was called on, which gathers the weight; where "
                "tensor parallelism cuts words, use torch's loss_parallel with logits of the head"
            )
