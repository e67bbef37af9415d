// norm_linear as one autograd function where NormOperand's codes are multiplied; elsewhere it is
// torch's normalization and a linear for each weight.
#include "ops/linear/norm_linear.h"

#include "ops/linear/autograd.h"

namespace qshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct NormLinearState {
  NormFacts norm = {};
  std::vector<WeightFacts> weights = {};
  std::vector<at::ScalarType> biases = {};  // of all weights, or none
  bool with_input = false;
  auto fields() { return std::tie(norm, weights, biases, with_input); }
};

struct NormLinearFunction : Function<NormLinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& norm_weight,
                               const OptionalTensor& norm_bias, at::TensorList weights,
                               at::TensorList biases, double eps, bool rms,
                               bool zero_centered_gamma, const std::string& format, bool with_input,
                               bool records_grad) {
    at::AutoDispatchBelowAutograd guard;
    auto [outputs, kept] = NormedInput::multiply(
        input, {norm_weight, norm_bias, eps, rms, zero_centered_gamma}, weights, biases, format);
    const NormedInput::Needs needs(records_grad, input, norm_weight, norm_bias, weights);
    variable_list saved;
    NormLinearState state{.norm = kept.save(needs, saved), .with_input = with_input};
    for (const Tensor& weight : weights) {
      const KeptWeight kept_weight(weight, needs.normed, format, std::nullopt);
      state.weights.push_back(kept_weight.save(saved));
    }
    for (const Tensor& bias : biases) state.biases.push_back(bias.scalar_type());
    save_state(ctx, std::move(state));
    ctx->save_for_backward(std::move(saved));
    // An output that was not used has no gradient, and its weight gets none.
    ctx->set_materialize_grads(false);
    if (with_input) outputs.push_back(input);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto state = load_state<NormLinearState>(ctx);
    Tensor grad_input_itself;
    if (state.with_input) {
      grad_input_itself = std::move(grads.back());
      grads.pop_back();
    }
    const size_t count = grads.size();
    variable_list result(kWeights + count + state.biases.size() + kOptions);
    const bool needs_input = ctx->needs_input_grad(0);
    if (needs_input) result[0] = grad_input_itself;
    bool is_reached = false;
    for (const Tensor& grad : grads) {
      if (!grad.defined()) continue;
      refuse_double_backward(grad, "qshard::norm_linear");
      is_reached = true;
    }
    if (!is_reached) return result;
    const auto saved = ctx->get_saved_variables();
    const NormedInput kept = NormedInput::restore(state.norm, saved.data());
    // Edges are numbered by the tensors that forward was given, without undefined ones.
    const bool has_norm_bias = kept.has_bias();
    const size_t first_weight = kWeights - (has_norm_bias ? 0 : 1);
    const size_t first_bias = first_weight + count;
    const bool needs_norm_weight = ctx->needs_input_grad(1);
    const bool needs_norm_bias = has_norm_bias && ctx->needs_input_grad(2);
    const bool needs_normed = needs_input || needs_norm_weight || needs_norm_bias;
    auto* node = evaluated_node<NormLinearFunction>(ctx);

    at::AutoDispatchBelowAutograd guard;
    Tensor columns;  // of norm(input), for all wgrads
    const auto needs_weight = [&](size_t i) { return ctx->needs_input_grad(first_weight + i); };
    for (size_t i = 0; i < count && !columns.defined(); ++i) {
      if (grads[i].defined() && needs_weight(i)) columns = kept.columns();
    }
    // For separate linears autograd evaluates the last first, and adds their gradients in that
    // order.
    Tensor grad_normed;
    for (size_t i = count; i-- > 0;) {
      const Tensor& grad = grads[i];
      if (!grad.defined()) continue;
      if (needs_weight(i) || needs_normed) {
        const RestoredWeight weight(state.weights[i],
                                    &saved[kSavedWeights + i * KeptWeight::kSaved], grad);
        const Tensor& operand = restored_input(columns, grad);
        const GradSink into(needs_weight(i) ? node : nullptr, first_weight + i, weight.weight, grad,
                            operand);
        auto [part, grad_weight] =
            linear_gradients(into, {grad}, weight, operand, /*input_is_quantized=*/needs_weight(i),
                             needs_normed, needs_weight(i), /*weight_only=*/false, grad_normed);
        if (needs_weight(i)) result[kWeights + i] = grad_weight;
        if (needs_normed) grad_normed = part;
      }
      if (!state.biases.empty() && ctx->needs_input_grad(first_bias + i)) {
        result[kWeights + count + i] = bias_gradient(grad, state.biases[i]);
      }
    }
    columns.reset();
    if (needs_normed) {
      auto [grad_input, grad_norm_weight, grad_norm_bias] =
          kept.backward(grad_normed, grad_input_itself, needs_norm_weight || needs_norm_bias);
      if (needs_input) result[0] = grad_input;
      if (needs_norm_weight) result[1] = grad_norm_weight;
      if (needs_norm_bias) result[2] = grad_norm_bias;
    }
    return result;
  }

 private:
  // Arguments of forward: the weights and the biases follow the first of them, then come these.
  enum : size_t { kWeights = 3, kOptions = 6, kSavedWeights = NormedInput::kSaved };
};

/// The format of all weights. Traced ones do not show theirs, so the caller gives it.
std::string name_of(at::TensorList weights, std::optional<c10::string_view> format) {
  return format ? std::string(*format) : std::string(buffer_of(weights[0]).layout().format->name);
}

void check_norm_linear(const Tensor& input, const NormArguments& norm, at::TensorList weights,
                       const std::optional<std::vector<Tensor>>& biases,
                       std::optional<c10::string_view> format) {
  bool fits = input.dim() >= 1 && norm.fits(input) && !weights.empty() &&
              (!biases || biases->size() == weights.size());
  for (const Tensor& weight : weights) {
    fits = fits && weight.dim() == 2 && weight.sym_size(1) == input.sym_size(-1);
  }
  const auto shapes = [&] {
    std::string text;
    for (const Tensor& weight : weights) {
      text += (text.empty() ? "" : ", ") + c10::str(weight.sym_sizes());
    }
    return text;
  };
  TORCH_CHECK(fits, "qshard::norm_linear: input ", input.sym_sizes(), ", ",
              norm.rms ? "RMSNorm" : "LayerNorm", " of ", norm.weight.sym_sizes(), " and ",
              norm.has_bias() ? c10::str(norm.bias->sym_sizes()) : std::string("no bias"),
              ", weights ", shapes(), " and ",
              biases ? c10::str(biases->size()) : std::string("no"),
              " biases do not go together: the normalization has (columns,), RMSNorm no bias, "
              "weights are (rows, columns), and all or none of them have a bias");
  check_format_name(weights[0], format, "qshard::norm_linear");
}

/// linear(normed, weight, bias) for each of the weights.
template <typename Linear>
std::vector<Tensor> for_each_weight(const Linear& linear, const Tensor& normed,
                                    at::TensorList weights,
                                    const std::optional<std::vector<Tensor>>& biases,
                                    std::optional<c10::string_view> format) {
  std::vector<Tensor> outputs;
  outputs.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto bias = biases ? OptionalTensor((*biases)[i]) : std::nullopt;
    outputs.push_back(linear(normed, weights[i], bias, /*weight_only=*/false, format, std::nullopt,
                             std::nullopt, /*input_is_kept=*/false));
  }
  return outputs;
}

}  // namespace

std::vector<Tensor> norm_linear(const Tensor& input, const Tensor& norm_weight,
                                const OptionalTensor& norm_bias, at::TensorList weights,
                                const std::optional<std::vector<Tensor>>& biases, double eps,
                                bool rms, bool zero_centered_gamma,
                                std::optional<c10::string_view> format, bool with_input) {
  const NormArguments norm{norm_weight, norm_bias, eps, rms, zero_centered_gamma};
  check_norm_linear(input, norm, weights, biases, format);
  std::vector<Tensor> outputs;
  if (norm_linear_reads_codes(input, norm_weight, norm_bias, weights, format)) {
    outputs = std::get<0>(norm_linear_forward(input, norm_weight, norm_bias, weights, biases, eps,
                                              rms, zero_centered_gamma, name_of(weights, format)));
  } else {
    outputs = for_each_weight(linear, normalized_by_torch(input, norm), weights, biases, format);
  }
  if (with_input) outputs.push_back(input);
  return outputs;
}

std::vector<Tensor> norm_linear_autograd(const Tensor& input, const Tensor& norm_weight,
                                         const OptionalTensor& norm_bias, at::TensorList weights,
                                         const std::optional<std::vector<Tensor>>& biases,
                                         double eps, bool rms, bool zero_centered_gamma,
                                         std::optional<c10::string_view> format, bool with_input) {
  const NormArguments norm{norm_weight, norm_bias, eps, rms, zero_centered_gamma};
  check_norm_linear(input, norm, weights, biases, format);
  if (norm_linear_reads_codes(input, norm_weight, norm_bias, weights, format)) {
    const at::TensorList given_biases = biases ? at::TensorList(*biases) : at::TensorList();
    return NormLinearFunction::apply(input, norm_weight, norm_bias, weights, given_biases, eps, rms,
                                     zero_centered_gamma, name_of(weights, format), with_input,
                                     at::GradMode::is_enabled());
  }
  auto outputs =
      for_each_weight(linear_autograd, normalized_by_torch(input, norm), weights, biases, format);
  if (with_input) outputs.push_back(input);
  return outputs;
}

}  // namespace qshard
