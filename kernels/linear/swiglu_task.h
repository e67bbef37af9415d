// The operands of SwiGLU's kernels, in builds with CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/swiglu/kernels.h"

namespace qshard::cuda {

/// A joined matrix has its second half where a tile begins, and a block of scales.
constexpr int64_t kTileColumns = 128;

/// `x` (M, K) itself, which may be undefined, or a copy whose rows are contiguous and do not
/// overlap.
inline at::Tensor with_dense_rows(const at::Tensor& x) {
  if (!x.defined()) return x;
  const bool is_dense = x.stride(1) == 1 && x.stride(0) >= x.size(1);
  return is_dense ? x : x.contiguous();
}

/// The task of gate and up (M, K), both with dense rows, or of gate alone; its gradient is not set.
inline SwigluTask swiglu_task(const at::Tensor& gate, const at::Tensor& up,
                              Activation activation = Activation::kSilu) {
  SwigluTask task;
  task.activation = activation;
  task.gate = gate.const_data_ptr();
  task.m = gate.size(0);
  task.k = gate.size(1);
  task.ld_gate = gate.stride(0);
  if (up.defined()) {
    task.up = up.const_data_ptr();
    task.ld_up = up.stride(0);
  }
  return task;
}

/// Columns [first, first + k) of a joined matrix; both begin tiles.
inline ActivationTask columns_of(ActivationTask whole, int64_t first, int64_t k, bool one_scale) {
  whole.k = k;
  if (whole.codes != nullptr) {
    whole.codes += first;
    if (!one_scale) whole.scale_inv += first / kTileColumns * whole.m_padded;
  }
  if (whole.codes_t != nullptr) {
    whole.codes_t += first * whole.m_padded_t;
    if (!one_scale) whole.scale_inv_t += first;
  }
  return whole;
}

}  // namespace qshard::cuda
