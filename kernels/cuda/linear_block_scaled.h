// MXFP8 and NVFP4 linears on Blackwell: operands and their block-scaled GEMMs. Runs on the current
// device and stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/linear.h"

namespace qshard::cuda {

/// Whether the device has block-scaled tensor cores: compute capability 10.0 and above.
bool has_block_scaled_gemm(at::Device device);

// The GEMMs. Activations and gradients are quantized on the way in; NVFP4 gradients round
// stochastically (arXiv:2509.25149), by words of torch's CUDA generator. Each returns an undefined
// tensor if cuBLASLt has no kernel.

/// (M, N) = x @ weight^T + bias, in x's dtype.
at::Tensor block_scaled_forward(const at::Tensor& x, const WeightOperand& weight,
                                const std::optional<at::Tensor>& bias);
/// (M, K) = grad @ weight, in grad's dtype; the weight's format has square blocks.
at::Tensor block_scaled_grad_input(const at::Tensor& grad, const WeightOperand& weight);
/// (N, K) = grad^T @ x in `dtype`, both quantized along the tokens to meet a weight of `format`.
at::Tensor block_scaled_grad_weight(const at::Tensor& grad, const at::Tensor& x,
                                    const Format& format, at::ScalarType dtype);

}  // namespace qshard::cuda
