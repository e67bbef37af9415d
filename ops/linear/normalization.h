// LayerNorm and RMSNorm on CUDA devices, for qshard/nn/parts/norms.py, which knows their formulas
// in torch's operators.
#pragma once

#include "ops/calls/ops.h"

namespace qshard {

/// Whether _normalize takes them.
bool can_normalize(const Tensor& input, const Tensor& weight, const OptionalTensor& bias);

/// (normalized input (..., columns), float32 statistics for backward): over the last dimension, in
/// fp32, rounded once. weight, bias: (columns,), float32, bfloat16 or float16.
/// @throws c10::Error for what can_normalize refuses.
std::tuple<Tensor, Tensor> normalize(const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& bias, double eps, bool rms,
                                     bool zero_centered_gamma);

/// Packed codes, rowwise and columnwise, of the normalized input (rows, columns), to meet a weight
/// of `format`: (0,) unless asked for; and statistics, (0,) if they were given, without the values
/// in memory. `statistics` and `amax`: what is known of them, as NormOperand takes them.
/// @throws c10::Error for what can_normalize refuses.
std::tuple<Tensor, Tensor, Tensor> quantize_normalized(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias, double eps, bool rms,
    bool zero_centered_gamma, c10::string_view format, bool rows, bool columns,
    const OptionalTensor& statistics, const OptionalTensor& amax);

/// Gradients of input (+ added, another gradient of it), weight and bias; (0,) of the latter two
/// unless needed.
std::tuple<Tensor, Tensor, Tensor> normalize_backward(const Tensor& grad, const Tensor& input,
                                                      const Tensor& weight, const Tensor& stats,
                                                      bool zero_centered_gamma,
                                                      bool needs_parameters,
                                                      const OptionalTensor& added);

/// Shapes and dtypes.
std::tuple<Tensor, Tensor, Tensor> quantize_normalized_meta(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias, double eps, bool rms,
    bool zero_centered_gamma, c10::string_view format, bool rows, bool columns,
    const OptionalTensor& statistics, const OptionalTensor& amax);
std::tuple<Tensor, Tensor, Tensor> normalize_backward_meta(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& stats,
    bool zero_centered_gamma, bool needs_parameters, const OptionalTensor& added);

}  // namespace qshard
