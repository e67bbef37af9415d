#include "ops/linear/norm_linear.h"

#include <fmt/format.h>

#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/linear/norm_operand.h"
#include "ops/linear/linear_operands.h"
#include "ops/linear/normalization.h"

namespace qshard {
namespace {

std::vector<Tensor> empty_outputs(const Tensor& input, at::TensorList weights) {
  TORCH_CHECK(input.dim() >= 1, "qshard::norm_linear: needs an input of 1 or more dimensions");
  std::vector<Tensor> outputs;
  for (const Tensor& weight : weights) {
    auto sizes = input.sym_sizes().vec();
    sizes.back() = weight.sym_size(0);
    outputs.push_back(at::empty_symint(sizes, input.options()));
  }
  return outputs;
}

}  // namespace

std::tuple<std::vector<Tensor>, Tensor, Tensor> norm_linear_forward(
    const Tensor& input, const Tensor& norm_weight, const OptionalTensor& norm_bias,
    at::TensorList weights, const std::optional<std::vector<Tensor>>& biases, double eps, bool rms,
    bool zero_centered_gamma, c10::string_view format) {
  PlainGuard guard;
  const char* op = "qshard::_norm_linear_forward";
  const Format& own = checked_format(format, op);
  TORCH_CHECK(norm_linear_reads_codes(input, norm_weight, norm_bias, weights, format) &&
                  (!biases || biases->size() == weights.size()),
              fmt::format("{}: needs a CUDA input that _normalize takes, {} weights whose GEMMs "
                          "read its codes, and as many biases or none; call qshard::norm_linear. A "
                          "compiled module whose weight was replaced needs "
                          "qshard.quantize_(module, recipe) for the new format",
                          op, own.name));
  const c10::OptionalDeviceGuard device_guard(input.device());
  const NormOperand rows(as_matrix(input), {.weight = norm_weight,
                                            .bias = norm_bias.value_or(Tensor()),
                                            .eps = static_cast<float>(eps),
                                            .rms = rms,
                                            .zero_centered_gamma = zero_centered_gamma});
  const CachedOperand operand(rows, {.rowwise = true});
  auto sizes = input.sizes().vec();
  std::vector<Tensor> outputs;
  outputs.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[i];
    const OptionalTensor bias = biases ? OptionalTensor((*biases)[i]) : std::nullopt;
    const auto used = weight_for_use(weight, std::nullopt, std::nullopt, WeightUse::kForward, op);
    check_linear_shapes(input, weight, bias);
    Tensor output = linear_forward(operand, used, bias, /*save_quantized_input=*/false).output;
    sizes.back() = weight.size(0);
    // Detached from the 2-D result, as of qshard::linear.
    outputs.push_back(input.dim() == 2 ? output : at::_unsafe_view(output, sizes));
  }
  if (packed_scale_mode(own) != ScaleMode::kTensor) {
    return {std::move(outputs), rows.statistics(),
            at::empty({0}, input.options().dtype(at::kFloat))};
  }
  // Weights whose codes cannot be multiplied where they lie take values, and leave no amax.
  if (!rows.amax().defined()) {
    rows.codes({.format = &own, .orientations = {.rowwise = true}});
  }
  return {std::move(outputs), rows.statistics(), rows.amax()};
}

std::vector<Tensor> norm_linear_meta(const Tensor& input, const Tensor&, const OptionalTensor&,
                                     at::TensorList weights,
                                     const std::optional<std::vector<Tensor>>&, double, bool, bool,
                                     std::optional<c10::string_view>, bool with_input) {
  auto outputs = empty_outputs(input, weights);
  if (with_input) outputs.push_back(at::empty_like(input));
  return outputs;
}

std::tuple<std::vector<Tensor>, Tensor, Tensor> norm_linear_forward_meta(
    const Tensor& input, const Tensor&, const OptionalTensor&, at::TensorList weights,
    const std::optional<std::vector<Tensor>>&, double, bool rms, bool, c10::string_view format) {
  const Format& own = checked_format(format, "qshard::_norm_linear_forward");
  const bool one_scale = packed_scale_mode(own) == ScaleMode::kTensor;
  const auto fp32 = input.options().dtype(at::kFloat);
  return {empty_outputs(input, weights), at::empty({rms ? 1 : 2, leading_numel(input)}, fp32),
          at::empty({one_scale ? 1 : 0}, fp32)};
}

}  // namespace qshard
