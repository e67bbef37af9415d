// A linear's weight.
#pragma once

#include "kernels/quantized_matrix.h"

namespace qshard {

/// A weight (N, K) and what its linear remembers beside it.
struct LinearWeight {
  QuantizedMatrix codes;  // rows of a row image
  // Of delayed scaling (kernels/scaling_state.h), undefined without it.
  at::Tensor amax_history = {};
  at::Tensor scaling_amax = {};
};

}  // namespace qshard
