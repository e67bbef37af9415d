// GEMMs of codes by torch's own GEMMs: the product of what the codes stand for, on every device.
// They tell what FP8 and block-scaled GEMMs compute where no such GEMM runs.
//
// Codes are multiplied without the scales of tensors and rows, which scale the sum in fp32. The
// scales of blocks are multiplied in first where that is exact: powers of two, and the E4M3 scales
// of E2M1 codes. In blocks of 128 with fp32 scales there is one product for each block of the
// contraction, and the scaled products are added in fp32, as GEMMs of such codes do. Products of
// codes are exact in fp32, so what differs from a GEMM of codes is the order, and the width, in
// which it adds them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/linear/quantized_matrix.h"

namespace qshard {

// Operands are those of the GEMMs of codes: kernels/linear/linear_fp8.h, linear_block_scaled.h.
// Results are rounded once, to the dtype of `options`.

/// (M, N) = x @ weight^T + bias + added, if that is defined; reads x rowwise.
at::Tensor emulated_forward(const QuantizedMatrix& x, const QuantizedMatrix& weight,
                            const std::optional<at::Tensor>& bias, const at::TensorOptions& options,
                            const at::Tensor& added = {});
/// (M, K) = grad @ weight; reads grad rowwise. The weight has the same scales when transposed.
at::Tensor emulated_grad_input(const QuantizedMatrix& grad, const QuantizedMatrix& weight,
                               const at::TensorOptions& options);
/// (N, K) = grad^T @ x; reads both columnwise.
at::Tensor emulated_grad_weight(const QuantizedMatrix& grad, const QuantizedMatrix& x,
                                const at::TensorOptions& options);

}  // namespace qshard
