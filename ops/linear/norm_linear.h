// Linears of normalized rows: norm(x) multiplied by one or several quantized weights
// (ops/linear/normed_input.h).
#pragma once

#include "ops/linear/normed_input.h"

namespace qshard {

/// ops/linear/norm_linear_autograd.cpp. norm(input) @ weight^T + bias for each of the weights;
/// `biases`: one for each weight, or none. `format`: as for `linear`. with_input: the last result
/// is the input, for a caller that adds it to something: that sum's gradient is added to the norm's
/// as this is written.
/// @throws c10::Error for shapes that do not go together, and for an RMSNorm with a bias.
std::vector<Tensor> norm_linear(const Tensor& input, const Tensor& norm_weight,
                                const OptionalTensor& norm_bias, at::TensorList weights,
                                const std::optional<std::vector<Tensor>>& biases, double eps,
                                bool rms, bool zero_centered_gamma,
                                std::optional<c10::string_view> format, bool with_input);
std::vector<Tensor> norm_linear_autograd(const Tensor& input, const Tensor& norm_weight,
                                         const OptionalTensor& norm_bias, at::TensorList weights,
                                         const std::optional<std::vector<Tensor>>& biases,
                                         double eps, bool rms, bool zero_centered_gamma,
                                         std::optional<c10::string_view> format, bool with_input);

/// ops/linear/norm_linear.cpp. (outputs, statistics, amax), the latter two as NormOperand takes
/// them, to make columns: amax (0,) of formats whose scales are not per tensor.
/// @throws c10::Error for what norm_linear_reads_codes refuses.
std::tuple<std::vector<Tensor>, Tensor, Tensor> norm_linear_forward(
    const Tensor& input, const Tensor& norm_weight, const OptionalTensor& norm_bias,
    at::TensorList weights, const std::optional<std::vector<Tensor>>& biases, double eps, bool rms,
    bool zero_centered_gamma, c10::string_view format);

/// ops/linear/norm_linear.cpp: shapes and dtypes.
std::vector<Tensor> norm_linear_meta(const Tensor& input, const Tensor& norm_weight,
                                     const OptionalTensor& norm_bias, at::TensorList weights,
                                     const std::optional<std::vector<Tensor>>& biases, double eps,
                                     bool rms, bool zero_centered_gamma,
                                     std::optional<c10::string_view> format, bool with_input);
std::tuple<std::vector<Tensor>, Tensor, Tensor> norm_linear_forward_meta(
    const Tensor& input, const Tensor& norm_weight, const OptionalTensor& norm_bias,
    at::TensorList weights, const std::optional<std::vector<Tensor>>& biases, double eps, bool rms,
    bool zero_centered_gamma, c10::string_view format);

}  // namespace qshard
