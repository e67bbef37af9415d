#include "ops/norm_linear.h"

#include <fmt/format.h>

#include "dispatch/kernel_bridge.h"
#include "dispatch/quantized_tensor_impl.h"
#include "kernels/norm_operand.h"
#include "ops/linear_operands.h"
#include "ops/normalization.h"

namespace qshard {
namespace {

// Of what is traced, wrapped, or a subclass, nothing is known here.
bool is_bare(const Tensor& tensor) {
  const auto keys = tensor.key_set();
  return !keys.has_any(c10::python_ks | c10::functorch_transforms_ks) &&
         !keys.has(c10::DispatchKey::Functionalize);
}

}  // namespace

bool norm_linear_reads_codes(const Tensor& input, const Tensor& norm_weight,
                             const OptionalTensor& norm_bias, at::TensorList weights) {
  const bool has_bias = norm_bias && norm_bias->defined();
  if (!input.is_cuda() || input.dim() == 0 || weights.empty() || !is_bare(input) ||
      !is_bare(norm_weight) || (has_bias && !is_bare(*norm_bias))) {
    return false;
  }
  const at::Device device = input.device();
  const int64_t m = leading_numel(input);
  const int64_t k = input.size(-1);
  const Format* format = nullptr;
  for (const Tensor& weight : weights) {
    if (!is_bare(weight) || !has_key(weight) || weight.dim() != 2 || weight.size(0) == 0 ||
        weight.size(1) != k || weight.device() != device) {
      return false;
    }
    const Format& own = *buffer_of(weight).layout().format;
    const int64_t n = weight.size(0);
    // Delayed scaling scales the input of each linear by a history of that linear's own.
    const bool is_read = own.amax_history.length == 0 && (format == nullptr || format == &own) &&
                         multiplies_input_codes(own, device, input.scalar_type(), m, n, k) &&
                         (!weight.requires_grad() || can_save_quantized_input(device, m, n, k));
    if (!is_read) return false;
    format = &own;
  }
  return can_normalize(input, norm_weight, norm_bias);
}

std::tuple<std::vector<Tensor>, Tensor, Tensor> norm_linear_forward(
    const Tensor& input, const Tensor& norm_weight, const OptionalTensor& norm_bias,
    at::TensorList weights, const std::optional<std::vector<Tensor>>& biases, double eps, bool rms,
    bool zero_centered_gamma) {
  PlainGuard guard;
  const char* op = "qshard::_norm_linear_forward";
  TORCH_CHECK(norm_linear_reads_codes(input, norm_weight, norm_bias, weights) &&
                  (!biases || biases->size() == weights.size()),
              fmt::format("{}: needs a CUDA input that _normalize takes, of quantized weights of "
                          "one format whose GEMMs read its codes, and as many biases or none; call "
                          "qshard::norm_linear",
                          op));
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
  // A weight whose codes cannot be multiplied where they lie takes values, and finds no amax.
  const Tensor& amax = rows.amax();
  return {std::move(outputs), rows.statistics(),
          amax.defined() ? amax : at::empty({0}, input.options().dtype(at::kFloat))};
}

std::vector<Tensor> norm_linear_meta(const Tensor& input, const Tensor&, const OptionalTensor&,
                                     at::TensorList weights,
                                     const std::optional<std::vector<Tensor>>&, double, bool, bool,
                                     std::optional<c10::string_view>) {
  TORCH_CHECK(input.dim() >= 1, "qshard::norm_linear: needs an input of 1 or more dimensions");
  std::vector<Tensor> outputs;
  for (const Tensor& weight : weights) {
    auto sizes = input.sym_sizes().vec();
    sizes.back() = weight.sym_size(0);
    outputs.push_back(at::empty_symint(sizes, input.options()));
  }
  return outputs;
}

}  // namespace qshard
