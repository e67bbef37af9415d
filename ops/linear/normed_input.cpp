#include "ops/linear/normed_input.h"

#include <algorithm>
#include <array>

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/linear/linear.h"
#include "ops/linear/autograd.h"
#include "ops/linear/linear_operands.h"
#include "ops/linear/norm_linear.h"
#include "ops/linear/normalization.h"

namespace qshard {
namespace {

using torch::autograd::variable_list;

bool is_traced(const Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

// What a wrapped tensor holds is not known here.
bool is_bare(const Tensor& tensor) {
  const auto keys = tensor.key_set();
  return !keys.has_any(c10::functorch_transforms_ks) &&
         (keys.has(c10::DispatchKey::Python) || !keys.has(c10::DispatchKey::Functionalize));
}

bool has_known_sizes(const Tensor& tensor) {
  const auto sizes = tensor.sym_sizes();
  return std::all_of(sizes.begin(), sizes.end(), is_known);
}

OptionalTensor given(const Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? OptionalTensor(tensor) : std::nullopt;
}

}  // namespace

const Format* input_codes_format(const Tensor& input, at::TensorList weights,
                                 std::optional<c10::string_view> format) {
  const bool traced = is_traced(input);
  if (!input.is_cuda() || input.dim() == 0 || weights.empty() || (traced && !format) ||
      !is_bare(input) || !has_known_sizes(input) || has_key(input)) {
    return nullptr;
  }
  const Format* common = format ? &checked_format(*format, "qshard::norm_linear") : nullptr;
  const at::Device device = input.device();
  const int64_t m = leading_numel(input);
  const int64_t k = input.size(-1);
  for (const Tensor& weight : weights) {
    if (!is_bare(weight) || is_traced(weight) != traced || !(traced || has_key(weight)) ||
        weight.dim() != 2 || !has_known_sizes(weight) || weight.size(0) == 0 ||
        weight.size(1) != k || weight.device() != device) {
      return nullptr;
    }
    const Format& own = traced ? *common : *buffer_of(weight).layout().format;
    const int64_t n = weight.size(0);
    // Delayed scaling scales the input of each linear by a history of that linear's own.
    const bool is_read = own.amax_history.length == 0 && (common == nullptr || common == &own) &&
                         multiplies_input_codes(own, device, input.scalar_type(), m, n, k) &&
                         (!weight.requires_grad() || can_save_quantized_input(device, m, n, k));
    if (!is_read) return nullptr;
    common = &own;
  }
  return common;
}

bool norm_linear_reads_codes(const Tensor& input, const Tensor& norm_weight,
                             const OptionalTensor& norm_bias, at::TensorList weights,
                             std::optional<c10::string_view> format) {
  const bool has_bias = norm_bias && norm_bias->defined();
  if (format) checked_format(*format, "qshard::_norm_linear_reads_codes");
  return is_bare(norm_weight) && (!has_bias || is_bare(*norm_bias)) &&
         input_codes_format(input, weights, format) != nullptr &&
         can_normalize(input, norm_weight, norm_bias);
}

bool NormArguments::fits(const Tensor& input) const {
  const auto is_of_columns = [&](const Tensor& parameter) {
    return parameter.dim() == 1 && parameter.sym_size(0) == input.sym_size(-1);
  };
  return is_of_columns(weight) && (!has_bias() || (!rms && is_of_columns(*bias)));
}

Tensor normalized_by_torch(const Tensor& input, const NormArguments& norm) {
  const auto dtype = input.scalar_type();
  const bool is_wide =
      norm.weight.scalar_type() != dtype || (norm.zero_centered_gamma && dtype != at::kFloat);
  const auto wide = [&](const Tensor& tensor) { return is_wide ? tensor.to(at::kFloat) : tensor; };
  const Tensor gamma = norm.zero_centered_gamma ? wide(norm.weight) + 1 : wide(norm.weight);
  // torch's rms_norm takes the bits of a symbol for its value.
  const std::array shape{gamma.sym_size(0).guard_int(__FILE__, __LINE__)};
  if (norm.rms) return at::rms_norm(wide(input), shape, gamma, norm.eps).to(dtype);
  const auto beta = norm.has_bias() ? OptionalTensor(wide(*norm.bias)) : std::nullopt;
  return at::layer_norm(wide(input), shape, gamma, beta, norm.eps).to(dtype);
}

std::pair<std::vector<Tensor>, NormedInput> NormedInput::multiply(const Tensor& input,
                                                                  const NormArguments& norm,
                                                                  at::TensorList weights,
                                                                  at::TensorList biases,
                                                                  const std::string& format) {
  static const auto op = typed_op<decltype(norm_linear_forward)>("qshard::_norm_linear_forward");
  NormedInput kept;
  kept.input_ = input;
  kept.norm_ = norm;
  kept.has_bias_ = norm.has_bias();
  kept.format_ = format;
  std::vector<Tensor> outputs;
  std::tie(outputs, kept.statistics_, kept.amax_) =
      op.call(input, norm.weight, norm.bias, weights,
              biases.empty() ? std::nullopt : std::optional(biases.vec()), norm.eps, norm.rms,
              norm.zero_centered_gamma, format);
  return {std::move(outputs), std::move(kept)};
}

NormedInput::Needs::Needs(bool records, const Tensor& input, const Tensor& norm_weight,
                          const OptionalTensor& norm_bias, at::TensorList weights) {
  if (!records) return;
  const bool trains_bias = norm_bias && norm_bias->defined() && norm_bias->requires_grad();
  normed = input.requires_grad() || norm_weight.requires_grad() || trains_bias;
  this->weights = std::any_of(weights.begin(), weights.end(),
                              [](const Tensor& weight) { return weight.requires_grad(); });
}

NormFacts NormedInput::save(const Needs& needs, variable_list& saved) const {
  if (needs.normed) {
    const bool both = needs.weights;  // columns are made of them, beside the gradients
    saved.insert(saved.end(),
                 {input_, norm_.weight, both ? norm_.bias.value_or(Tensor()) : Tensor(),
                  statistics_, both ? amax_ : Tensor(), Tensor()});
  } else {
    saved.resize(saved.size() + kSaved - 1);
    saved.push_back(needs.weights ? columns() : Tensor());
  }
  return {norm_.eps, norm_.rms, norm_.zero_centered_gamma, has_bias_, format_};
}

NormedInput NormedInput::restore(const NormFacts& facts, const Tensor* saved) {
  NormedInput kept;
  kept.input_ = saved[0];
  kept.norm_ = {saved[1], given(saved[2]), facts.eps, facts.rms, facts.zero_centered_gamma};
  kept.statistics_ = saved[3];
  kept.amax_ = saved[4];
  kept.columns_ = saved[5];
  kept.has_bias_ = facts.has_bias;
  kept.format_ = facts.format;
  return kept;
}

Tensor NormedInput::columns() const {
  if (columns_.defined()) return columns_;
  static const auto op = typed_op<decltype(quantize_normalized)>("qshard::_quantize_normalized");
  return std::get<1>(op.call(as_matrix(input_), norm_.weight, norm_.bias, norm_.eps, norm_.rms,
                             norm_.zero_centered_gamma, format_, /*rows=*/false, /*columns=*/true,
                             statistics_, given(amax_)));
}

std::tuple<Tensor, Tensor, Tensor> NormedInput::backward(const Tensor& grad, const Tensor& added,
                                                         bool needs_parameters) const {
  static const auto op = typed_op<decltype(normalize_backward)>("qshard::_normalize_backward");
  return op.call(grad, input_, norm_.weight, statistics_, norm_.zero_centered_gamma,
                 needs_parameters, given(added));
}

}  // namespace qshard
