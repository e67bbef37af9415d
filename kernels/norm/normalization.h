// LayerNorm (arXiv:1607.06450) and RMSNorm (arXiv:1910.07467) over the last dimension, in one pass
// each way. CUDA devices only: elsewhere torch's operators compute them.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace qshard {

/// The longest row, which has columns in eights, that the registers of a CUDA block hold.
constexpr int64_t kMaxNormBytes = 32768;

struct Normalization {
  at::Tensor weight = {};  // (columns,), gamma
  at::Tensor bias = {};    // (columns,), or undefined
  float eps = 0.f;
  bool rms = false;
  bool zero_centered_gamma = false;  // gamma is 1 + weight
};

/// Whether the operators below take plain tensors: a CUDA x (..., columns), and parameters beside
/// it. Decided without their memory.
bool has_norm_kernel(const at::Tensor& x, const Normalization& norm);

/// ((x - mean) * rstd * gamma + bias, statistics): in fp32, rounded once to the dtype of `x`.
/// Statistics are float32 (1, rows) of RMSNorm: rstd; (2, rows) of LayerNorm: rstd, mean.
std::tuple<at::Tensor, at::Tensor> normalized(const at::Tensor& x, const Normalization& norm);

/// Gradients of x, weight and bias; the first + `added`, of its shape and dtype, to which it is
/// rounded before, or undefined; the latter two summed in fp32 and in the weight's dtype; (0,)
/// unless needed, and of a bias that RMSNorm does not have. The same bits in every run.
std::tuple<at::Tensor, at::Tensor, at::Tensor> normalization_gradients(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& statistics,
    const Normalization& norm, bool needs_parameters, const at::Tensor& added = {});

}  // namespace qshard
