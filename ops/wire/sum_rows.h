// The operator that adds up rows of tokens.
#pragma once

#include "ops/calls/ops.h"

namespace qshard {

/// rows: (R, N) float32, bfloat16 or float16; places: (T, k) int64 beside it. (T, N) in the dtype
/// of rows: kernels/sums/sum_rows.h. No autograd: it is what backward functions are made of.
/// @throws c10::Error naming shapes and dtypes that do not fit.
Tensor sum_rows_op(const Tensor& rows, const Tensor& places);
Tensor sum_rows_meta(const Tensor& rows, const Tensor& places);

}  // namespace qshard
