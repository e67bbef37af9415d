// The cross entropy of logits, and its gradient as values or as the codes that a linear's backward
// reads. Gradients are those of the sum of all losses, so between -1 and 1: their scale is known
// before they are, and what a mean or a caller multiplies them by is a factor of the scales.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/linear/operand_producer.h"

namespace qshard {

/// Logits (M, V), float32, bfloat16 or float16, and targets int64 (M,) beside them; both
/// contiguous.
struct CrossEntropy {
  at::Tensor logits;
  at::Tensor targets;
  int64_t ignored = -100;  // a target whose token counts for nothing
  double label_smoothing = 0.;
};

struct CrossEntropyLosses {
  at::Tensor losses;    // float32 (M,), 0 of ignored tokens
  at::Tensor totals;    // float32 (2,): the sum of the losses, and how many are not ignored
  at::Tensor log_sums;  // float32 (M,): log(sum(exp(logits))) of a row
};

/// Sums are in fp32, in an order that the device does not change (kernels/loss/softmax.h).
/// @throws c10::IndexError on the CPU for a target that is no column; CUDA devices give NaN.
CrossEntropyLosses cross_entropy_losses(const CrossEntropy& of);

/// (M, V), rounded to the dtype of the logits.
at::Tensor cross_entropy_gradient(const CrossEntropy& of, const at::Tensor& log_sums);

/// Packed codes of that: the bits that PlainOperand makes of it, in one pass on CUDA devices. One
/// scale is that of an amax of 1. Not for formats with a scale per row.
/// @throws c10::Error on a device without FP8 GEMMs, unless they are emulated.
QuantizedMatrix cross_entropy_codes(const CrossEntropy& of, const at::Tensor& log_sums,
                                    const OperandRequest& request);

}  // namespace qshard
