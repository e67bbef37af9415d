// Launchers of LayerNorm (arXiv:1607.06450) and RMSNorm (arXiv:1910.07467), forward and backward.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/format/formats.h"

namespace qshard::cuda {

/// An int holds the sum of these and of the rows that CUDA blocks take in one turn.
constexpr int64_t kMaxNormRows = 1 << 30;

/// Rows of x (rows, cols), normalized in fp32 and rounded once: (x - mean) * rstd * gamma + beta,
/// of RMSNorm without mean and beta. All but the statistics and partial sums are of one dtype,
/// contiguous, and begin at multiples of 16 bytes; so do gamma and beta, of a dtype of their own.
struct NormTask {
  const void* x = nullptr;
  const void* gamma = nullptr;  // (cols,), or less by 1
  const void* beta = nullptr;   // (cols,), of gamma's dtype, or null
  float* rstd = nullptr;        // (rows,): written by forward
  float* mean = nullptr;        // the same; null: RMSNorm
  void* y = nullptr;            // forward's result

  const void* grad = nullptr;   // of y
  const void* added = nullptr;  // to backward's result, once that is rounded; or null
  void* grad_x = nullptr;       // backward's result
  float* grad_gamma = nullptr;  // (norm_partials(), cols), a CUDA block's sums each; or null
  float* grad_beta = nullptr;   // the same, behind them; RMSNorm has none
  int64_t rows = 0;             // at most kMaxNormRows
  int cols = 0;  // a multiple of 8, at most kMaxNormBytes of them (kernels/norm/normalization.h)
  float eps = 0.f;
  bool zero_centered_gamma = false;
  DType dtype = DType::kFloat32;
  DType gamma_dtype = DType::kFloat32;
};

/// How many sums of rows backward leaves for launch_norm_parameter_gradients().
int norm_partials(const NormTask& task);

cudaError_t launch_norm(const NormTask& task, cudaStream_t stream);
cudaError_t launch_norm_backward(const NormTask& task, cudaStream_t stream);

/// Adds up what backward has left: `grads` (1 or 2, cols) of gamma's dtype, gamma's and beta's.
cudaError_t launch_norm_parameter_gradients(const NormTask& task, void* grads, cudaStream_t stream);

}  // namespace qshard::cuda
