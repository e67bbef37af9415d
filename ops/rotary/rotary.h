// Rotary position embedding, what lies between the linears of attention.
#pragma once

#include "ops/calls/ops.h"

namespace qshard {

/// Raises, in the name of `op`, where input, tables and the positions' dimension do not fit.
void check_rotary(const char* op, const Tensor& input, const Tensor& cos, const Tensor& sin,
                  int64_t dim);

Tensor rotary_embedding(const Tensor& input, const Tensor& cos, const Tensor& sin, int64_t dim,
                        bool interleaved, bool inverse, at::OptionalSymIntArrayRef stride);
Tensor rotary_embedding_meta(const Tensor& input, const Tensor& cos, const Tensor& sin, int64_t dim,
                             bool interleaved, bool inverse, at::OptionalSymIntArrayRef stride);
Tensor rotary_embedding_autograd(const Tensor& input, const Tensor& cos, const Tensor& sin,
                                 int64_t dim, bool interleaved, bool inverse,
                                 at::OptionalSymIntArrayRef stride);

}  // namespace qshard
