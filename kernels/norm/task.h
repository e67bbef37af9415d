// The task of a normalization's kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "kernels/format/value_dtype.h"
#include "kernels/norm/kernels.h"
#include "kernels/norm/normalization.h"

namespace qshard::cuda {

/// x, contiguous, in vectors from the first value on.
inline at::Tensor in_vectors(const at::Tensor& x) {
  const at::Tensor dense = x.contiguous();
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

/// With its parameters so.
inline Normalization in_vectors(Normalization norm) {
  norm.weight = in_vectors(norm.weight);
  if (norm.bias.defined()) norm.bias = in_vectors(norm.bias);
  return norm;
}

/// Float32 (1, rows) of RMSNorm, (2, rows) of LayerNorm, yet to be written.
inline at::Tensor empty_statistics(const at::Tensor& x, const Normalization& norm) {
  return at::empty({norm.rms ? 1 : 2, x.numel() / x.size(-1)}, x.options().dtype(at::kFloat));
}

/// The task for x and parameters in vectors; neither the values nor gradients are set.
inline NormTask norm_task(const at::Tensor& x, const at::Tensor& statistics,
                          const Normalization& norm) {
  NormTask task;
  task.x = x.const_data_ptr();
  task.gamma = norm.weight.const_data_ptr();
  task.gamma_dtype = value_dtype(norm.weight.scalar_type());
  if (norm.bias.defined()) task.beta = norm.bias.const_data_ptr();
  task.cols = static_cast<int>(x.size(-1));
  task.rows = x.numel() / task.cols;
  TORCH_CHECK(task.rows <= kMaxNormRows, "qshard: a normalization of ", task.rows,
              " rows is too large for the CUDA kernels; call it on parts");
  task.rstd = static_cast<float*>(statistics.mutable_data_ptr());
  if (!norm.rms) task.mean = task.rstd + task.rows;
  task.eps = norm.eps;
  task.zero_centered_gamma = norm.zero_centered_gamma;
  task.dtype = value_dtype(x.scalar_type());
  return task;
}

}  // namespace qshard::cuda
