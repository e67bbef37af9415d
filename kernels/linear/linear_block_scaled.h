// MXFP8 and NVFP4 linears on Blackwell: their block-scaled GEMMs. Runs on the current device and
// stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/linear/quantized_matrix.h"

namespace qshard::cuda {

// The GEMMs, of row images. Each returns an undefined tensor if cuBLASLt has no kernel.

/// (M, N) = x @ weight^T + bias + added, if that is defined; reads x rowwise.
at::Tensor block_scaled_forward(const QuantizedMatrix& x, const QuantizedMatrix& weight,
                                const std::optional<at::Tensor>& bias,
                                const at::TensorOptions& options, const at::Tensor& added = {});
/// (M, K) = grad @ weight; reads grad rowwise. The weight's format has square blocks.
at::Tensor block_scaled_grad_input(const QuantizedMatrix& grad, const QuantizedMatrix& weight,
                                   const at::TensorOptions& options);
/// (N, K) = grad^T @ x; reads both columnwise.
at::Tensor block_scaled_grad_weight(const QuantizedMatrix& grad, const QuantizedMatrix& x,
                                    const at::TensorOptions& options);

}  // namespace qshard::cuda
