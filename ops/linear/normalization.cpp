#include "ops/linear/normalization.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/linear/norm_operand.h"
#include "ops/linear/linear_operands.h"

namespace qshard {
namespace {

void check(const char* op, bool fits, const Tensor& input, const Tensor& weight) {
  TORCH_CHECK(
      fits,
      fmt::format("{}: needs a CUDA input (..., columns) in float32, bfloat16 or "
                  "float16 and a weight (columns,) beside it, of columns in eights, at "
                  "most {} bytes; got {} of shape {} on {} and {} of shape {}",
                  op, kMaxNormBytes, c10::toString(input.scalar_type()), input.sizes().vec(),
                  input.device().str(), c10::toString(weight.scalar_type()), weight.sizes().vec()));
}

void check_bias(const char* op, bool rms, const OptionalTensor& bias) {
  TORCH_CHECK(!rms || !bias || !bias->defined(), op, ": an RMSNorm has no bias");
}

// What NormOperand's kernels read of earlier ones.
void check_known(const char* op, const Tensor& input, bool rms, const OptionalTensor& statistics,
                 const OptionalTensor& amax) {
  const auto is_fp32 = [&](const OptionalTensor& tensor, at::IntArrayRef sizes) {
    return !tensor || (tensor->scalar_type() == at::kFloat && tensor->sizes() == sizes &&
                       tensor->is_contiguous() && tensor->device() == input.device());
  };
  TORCH_CHECK(is_fp32(statistics, {rms ? 1 : 2, input.size(0)}) && is_fp32(amax, {1}),
              fmt::format("{}: statistics and amax must be float32 of shapes ({}, {}) and (1,) "
                          "beside the input",
                          op, rms ? 1 : 2, input.size(0)));
}

}  // namespace

bool can_normalize(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const Tensor beta = bias.value_or(Tensor());
  const bool has_keys = has_key(input) || has_key(weight) || (beta.defined() && has_key(beta));
  return !has_keys && has_norm_kernel(input, {.weight = weight, .bias = beta});
}

std::tuple<Tensor, Tensor> normalize(const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& bias, double eps, bool rms,
                                     bool zero_centered_gamma) {
  const char* op = "qshard::_normalize";
  check(op, can_normalize(input, weight, bias), input, weight);
  check_bias(op, rms, bias);
  const c10::OptionalDeviceGuard guard(input.device());
  const Normalization norm{weight, bias.value_or(Tensor()), static_cast<float>(eps), rms,
                           zero_centered_gamma};
  return normalized(input, norm);
}

std::tuple<Tensor, Tensor, Tensor> quantize_normalized(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias, double eps, bool rms,
    bool zero_centered_gamma, c10::string_view format, bool rows, bool columns,
    const OptionalTensor& statistics, const OptionalTensor& amax) {
  const char* op = "qshard::_quantize_normalized";
  check(op, input.dim() == 2 && can_normalize(input, weight, bias), input, weight);
  check_known(op, input, rms, statistics, amax);
  check_bias(op, rms, bias);
  const c10::OptionalDeviceGuard guard(input.device());
  const NormOperand operand(
      input, {weight, bias.value_or(Tensor()), static_cast<float>(eps), rms, zero_centered_gamma},
      statistics.value_or(Tensor()), amax.value_or(Tensor()));
  const QuantizedMatrix codes =
      operand.codes({.format = &checked_format(format, op), .orientations = {rows, columns}});
  return {bytes_or_none(codes.rowwise, input), bytes_or_none(codes.columnwise, input),
          statistics ? at::empty({0}, statistics->options()) : operand.statistics()};
}

std::tuple<Tensor, Tensor, Tensor> normalize_backward(const Tensor& grad, const Tensor& input,
                                                      const Tensor& weight, const Tensor& stats,
                                                      bool zero_centered_gamma,
                                                      bool needs_parameters,
                                                      const OptionalTensor& added) {
  const int64_t rows = input.numel() / std::max<int64_t>(input.size(-1), 1);
  const bool fits = can_normalize(input, weight, {}) && grad.sizes() == input.sizes() &&
                    grad.scalar_type() == input.scalar_type() && grad.device() == input.device() &&
                    stats.is_contiguous() && stats.scalar_type() == at::kFloat &&
                    stats.device() == input.device() && stats.dim() == 2 && stats.size(1) == rows &&
                    (stats.size(0) == 1 || stats.size(0) == 2) &&
                    (!added || (added->sizes() == input.sizes() && !has_key(*added) &&
                                added->scalar_type() == input.scalar_type() &&
                                added->device() == input.device()));
  check("qshard::_normalize_backward", fits, input, weight);
  const c10::OptionalDeviceGuard guard(input.device());
  const Normalization norm{weight, {}, 0.f, stats.size(0) == 1, zero_centered_gamma};
  return normalization_gradients(grad, input, stats, norm, needs_parameters,
                                 added.value_or(Tensor()));
}

std::tuple<Tensor, Tensor, Tensor> quantize_normalized_meta(const Tensor& input, const Tensor&,
                                                            const OptionalTensor&, double, bool rms,
                                                            bool, c10::string_view format,
                                                            bool rows, bool columns,
                                                            const OptionalTensor& statistics,
                                                            const OptionalTensor&) {
  checked_format(format, "qshard::_quantize_normalized");
  const int64_t m = leading_numel(input);
  const int64_t k = input.size(-1);
  const auto bytes = input.options().dtype(at::kByte);
  return {at::empty({rows ? packed_rowwise_bytes(m, k) : 0}, bytes),
          at::empty({columns ? packed_columnwise_bytes(m, k) : 0}, bytes),
          statistics ? at::empty({0}, statistics->options())
                     : at::empty({rms ? 1 : 2, m}, input.options().dtype(at::kFloat))};
}

std::tuple<Tensor, Tensor, Tensor> normalize_backward_meta(const Tensor&, const Tensor& input,
                                                           const Tensor& weight,
                                                           const Tensor& stats, bool,
                                                           bool needs_parameters,
                                                           const OptionalTensor&) {
  const bool rms = stats.size(0) == 1;
  const auto parameter_if = [&](bool is_needed) {
    return is_needed ? at::empty_like(weight) : at::empty({0}, weight.options());
  };
  return {at::empty(input.sizes(), input.options()), parameter_if(needs_parameters),
          parameter_if(needs_parameters && !rms)};
}

}  // namespace qshard
