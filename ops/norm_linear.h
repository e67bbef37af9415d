// Linears of normalized rows: norm(x) multiplied by one or several quantized weights. On CUDA,
// where their GEMMs read packed codes, norm(x) is quantized as it is made, in forward by rows and
// in backward again by columns, and neither its values nor its columns are kept.
#pragma once

#include "ops/ops.h"

namespace qshard {

/// Whether norm(input) reaches GEMMs with all the weights in codes that NormOperand makes: decided
/// from sizes, devices, dtypes and formats. Never of what is traced.
bool norm_linear_reads_codes(const Tensor& input, const Tensor& norm_weight,
                             const OptionalTensor& norm_bias, at::TensorList weights);

/// ops/norm_linear_autograd.cpp. norm(input) @ weight^T + bias for each of the weights; `biases` of
/// all or of none. `format`: as of `linear`.
/// @throws c10::Error for shapes that do not go together, and for an RMSNorm with a bias.
std::vector<Tensor> norm_linear(const Tensor& input, const Tensor& norm_weight,
                                const OptionalTensor& norm_bias, at::TensorList weights,
                                const std::optional<std::vector<Tensor>>& biases, double eps,
                                bool rms, bool zero_centered_gamma,
                                std::optional<c10::string_view> format);
std::vector<Tensor> norm_linear_autograd(const Tensor& input, const Tensor& norm_weight,
                                         const OptionalTensor& norm_bias, at::TensorList weights,
                                         const std::optional<std::vector<Tensor>>& biases,
                                         double eps, bool rms, bool zero_centered_gamma,
                                         std::optional<c10::string_view> format);

/// ops/norm_linear.cpp. (outputs, statistics, amax), the latter two as NormOperand takes them, to
/// make columns: amax (0,) where there is none.
/// @throws c10::Error for what norm_linear_reads_codes refuses.
std::tuple<std::vector<Tensor>, Tensor, Tensor> norm_linear_forward(
    const Tensor& input, const Tensor& norm_weight, const OptionalTensor& norm_bias,
    at::TensorList weights, const std::optional<std::vector<Tensor>>& biases, double eps, bool rms,
    bool zero_centered_gamma);

std::vector<Tensor> norm_linear_meta(const Tensor& input, const Tensor& norm_weight,
                                     const OptionalTensor& norm_bias, at::TensorList weights,
                                     const std::optional<std::vector<Tensor>>& biases, double eps,
                                     bool rms, bool zero_centered_gamma,
                                     std::optional<c10::string_view> format);

}  // namespace qshard
