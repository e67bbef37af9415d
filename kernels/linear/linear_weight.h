// A linear's weight.
#pragma once

#include <memory>

#include "kernels/linear/quantized_matrix.h"
#include "kernels/statistics/watched.h"
#include "kernels/tensors/last_input_amax.h"

namespace qshard {

/// A weight (N, K) and what its linear remembers beside it.
struct LinearWeight {
  QuantizedMatrix codes;  // rows of a row image
  // Delayed scaling's (kernels/scaling/scaling_state.h), undefined without it.
  at::Tensor amax_history = {};
  at::Tensor scaling_amax = {};
  LastInputAmax* last_input = nullptr;    // null for a weight that is quantized for one use
  std::shared_ptr<Watched> watched = {};  // null if no watch samples its operands
};

}  // namespace qshard
