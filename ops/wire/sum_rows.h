// The operator that adds up rows of tokens.
#pragma once

#include "ops/calls/ops.h"

namespace qshard {

/// rows: (R, N) float32, bfloat16 or float16; places: (P,) int64 and ends: (T,) int64 beside them.
/// (T, N) in the dtype of rows: kernels/sums/sum_rows.h. It has no gradient, because backward
/// functions are what call it.
/// @throws c10::Error naming shapes and dtypes that do not fit.
Tensor sum_rows_op(const Tensor& rows, const Tensor& places, const Tensor& ends);
Tensor sum_rows_meta(const Tensor& rows, const Tensor& places, const Tensor& ends);

}  // namespace qshard
