// norm_linear as one autograd function where NormOperand's codes are multiplied; elsewhere it is
// torch's normalization and a linear for each weight.
#include "ops/norm_linear.h"

#include "dispatch/kernel_bridge.h"
#include "ops/autograd.h"
#include "ops/leaf_grad.h"
#include "ops/linear_operands.h"
#include "ops/normalization.h"

namespace qshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

bool is_given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

struct NormLinearFunction : Function<NormLinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& norm_weight,
                               const OptionalTensor& norm_bias, at::TensorList weights,
                               at::TensorList biases, double eps, bool rms,
                               bool zero_centered_gamma) {
    at::AutoDispatchBelowAutograd guard;
    static const auto op = typed_op<decltype(norm_linear_forward)>("qshard::_norm_linear_forward");
    const auto given_biases =
        biases.empty() ? std::nullopt : std::optional<std::vector<Tensor>>(biases.vec());
    auto [outputs, statistics, amax] = op.call(input, norm_weight, norm_bias, weights, given_biases,
                                               eps, rms, zero_centered_gamma);
    variable_list saved{input, norm_weight, norm_bias.value_or(Tensor()), statistics, amax};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(std::move(saved));
    // An output that nobody used has no gradient, and its weight gets none.
    ctx->set_materialize_grads(false);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["rms"] = rms;
    ctx->saved_data["zero_centered_gamma"] = zero_centered_gamma;
    ctx->saved_data["format"] = std::string(buffer_of(weights[0]).layout().format->name);
    std::vector<int64_t> bias_dtypes;
    for (const Tensor& bias : biases) {
      bias_dtypes.push_back(static_cast<int64_t>(bias.scalar_type()));
    }
    ctx->saved_data["bias_dtypes"] = bias_dtypes;
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const size_t count = grads.size();
    const auto bias_dtypes = ctx->saved_data["bias_dtypes"].toIntVector();
    variable_list result(kWeights + count + bias_dtypes.size() + kOptions);
    bool is_reached = false;
    for (const Tensor& grad : grads) {
      if (!grad.defined()) continue;
      refuse_double_backward(grad, "qshard::norm_linear");
      is_reached = true;
    }
    if (!is_reached) return result;
    const auto saved = ctx->get_saved_variables();
    const Tensor& input = saved[0];
    const Tensor& norm_weight = saved[1];
    const Tensor& norm_bias = saved[2];
    const Tensor& statistics = saved[3];
    const auto weight_of = [&](size_t i) -> const Tensor& { return saved[kSavedWeights + i]; };
    // Of the tensors given to forward, those that there are count.
    const size_t first_weight = kWeights - (norm_bias.defined() ? 0 : 1);
    const size_t first_bias = first_weight + count;
    const bool needs_input = ctx->needs_input_grad(0);
    const bool needs_norm_weight = ctx->needs_input_grad(1);
    const bool needs_norm_bias = norm_bias.defined() && ctx->needs_input_grad(2);
    const bool needs_normed = needs_input || needs_norm_weight || needs_norm_bias;
    auto* node = evaluated_node<NormLinearFunction>(ctx);

    at::AutoDispatchBelowAutograd guard;
    Tensor columns;  // of norm(input), for all wgrads
    const auto needs_weight = [&](size_t i) { return ctx->needs_input_grad(first_weight + i); };
    for (size_t i = 0; i < count && !columns.defined(); ++i) {
      if (grads[i].defined() && needs_weight(i)) columns = columns_again(ctx, saved);
    }
    // Of linears one by one autograd evaluates the last first, and adds their gradients in that
    // order.
    Tensor grad_normed;
    for (size_t i = count; i-- > 0;) {
      const Tensor& grad = grads[i];
      if (!grad.defined()) continue;
      if (needs_weight(i) || needs_normed) {
        const Tensor part = linear_gradients(needs_weight(i) ? node : nullptr, first_weight + i,
                                             grad, weight_of(i), needs_weight(i) ? columns : input,
                                             needs_normed, needs_weight(i), result[kWeights + i]);
        if (needs_normed) grad_normed = grad_normed.defined() ? grad_normed.add_(part) : part;
      }
      if (!bias_dtypes.empty() && ctx->needs_input_grad(first_bias + i)) {
        result[kWeights + count + i] =
            bias_gradient(grad, static_cast<at::ScalarType>(bias_dtypes[i]));
      }
    }
    columns.reset();
    if (needs_normed) {
      static const auto op = typed_op<decltype(normalize_backward)>("qshard::_normalize_backward");
      auto [grad_input, grad_norm_weight, grad_norm_bias] = op.call(
          grad_normed, input, norm_weight, statistics,
          ctx->saved_data["zero_centered_gamma"].toBool(), needs_norm_weight || needs_norm_bias);
      if (needs_input) result[0] = grad_input;
      if (needs_norm_weight) result[1] = grad_norm_weight;
      if (needs_norm_bias) result[2] = grad_norm_bias;
    }
    return result;
  }

 private:
  // Arguments of forward: the weights and the biases follow the first of them, then come these.
  enum : size_t { kWeights = 3, kOptions = 3, kSavedWeights = 5 };

  static Tensor columns_again(AutogradContext* ctx, const variable_list& saved) {
    static const auto op = typed_op<decltype(quantize_normalized)>("qshard::_quantize_normalized");
    const auto given = [](const Tensor& tensor) {
      return tensor.defined() && tensor.numel() > 0 ? OptionalTensor(tensor) : std::nullopt;
    };
    const std::string format = ctx->saved_data["format"].toStringRef();
    return std::get<1>(op.call(as_matrix(saved[0]), saved[1], given(saved[2]),
                               ctx->saved_data["eps"].toDouble(), ctx->saved_data["rms"].toBool(),
                               ctx->saved_data["zero_centered_gamma"].toBool(), format,
                               /*rows=*/false, /*columns=*/true, saved[3], given(saved[4])));
  }

  // What qshard::linear's backward does, of an input saved as codes. Returns grad_input.
  static Tensor linear_gradients(torch::autograd::Node* node, size_t edge, const Tensor& grad,
                                 const Tensor& weight, const Tensor& input, bool needs_input,
                                 bool needs_weight, Tensor& grad_weight) {
    const WeightGrad into(node, edge, weight, grad, input);
    if (into.leaf.sum.defined()) {
      static const auto op =
          typed_op<decltype(linear_backward_accumulate_op)>("qshard::linear_backward_accumulate");
      return op.call(grad, weight, input, /*input_is_quantized=*/true, needs_input, into.leaf.sum,
                     /*weight_only=*/false, std::nullopt, std::nullopt);
    }
    static const auto op = typed_op<decltype(linear_backward_op)>("qshard::linear_backward");
    auto [grad_input, made] =
        op.call(grad, weight, input, /*input_is_quantized=*/needs_weight, needs_input, needs_weight,
                /*weight_only=*/false, into.dtype, std::nullopt, std::nullopt);
    if (needs_weight) grad_weight = made;
    return grad_input;
  }
};

void check_norm_linear(const Tensor& input, const Tensor& norm_weight,
                       const OptionalTensor& norm_bias, at::TensorList weights,
                       const std::optional<std::vector<Tensor>>& biases, bool rms) {
  const bool has_bias = is_given(norm_bias);
  bool fits = input.dim() >= 1 && norm_weight.dim() == 1 && !weights.empty() &&
              (!biases || biases->size() == weights.size()) &&
              input.sym_size(-1) == norm_weight.sym_size(0) &&
              (!has_bias || (!rms && norm_bias->sym_sizes() == norm_weight.sym_sizes()));
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
              rms ? "RMSNorm" : "LayerNorm", " of ", norm_weight.sym_sizes(), " and ",
              has_bias ? c10::str(norm_bias->sym_sizes()) : std::string("no bias"), ", weights ",
              shapes(), " and ", biases ? c10::str(biases->size()) : std::string("no"),
              " biases do not go together: the normalization has (columns,), RMSNorm no bias, "
              "weights are (rows, columns), and all or none of them have a bias");
}

// As qshard/nn/norms.py.
Tensor normalized_by_torch(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           double eps, bool rms, bool zero_centered_gamma) {
  const auto dtype = input.scalar_type();
  const bool is_wide =
      weight.scalar_type() != dtype || (zero_centered_gamma && dtype != at::kFloat);
  const auto wide = [&](const Tensor& tensor) { return is_wide ? tensor.to(at::kFloat) : tensor; };
  const Tensor gamma = zero_centered_gamma ? wide(weight) + 1 : wide(weight);
  const auto shape = gamma.sym_sizes();
  if (rms) return at::rms_norm_symint(wide(input), shape, gamma, eps).to(dtype);
  const auto beta = is_given(bias) ? OptionalTensor(wide(*bias)) : std::nullopt;
  return at::layer_norm_symint(wide(input), shape, gamma, beta, eps).to(dtype);
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
    outputs.push_back(
        linear(normed, weights[i], bias, /*weight_only=*/false, format, std::nullopt));
  }
  return outputs;
}

}  // namespace

std::vector<Tensor> norm_linear(const Tensor& input, const Tensor& norm_weight,
                                const OptionalTensor& norm_bias, at::TensorList weights,
                                const std::optional<std::vector<Tensor>>& biases, double eps,
                                bool rms, bool zero_centered_gamma,
                                std::optional<c10::string_view> format) {
  check_norm_linear(input, norm_weight, norm_bias, weights, biases, rms);
  if (norm_linear_reads_codes(input, norm_weight, norm_bias, weights)) {
    return std::get<0>(norm_linear_forward(input, norm_weight, norm_bias, weights, biases, eps, rms,
                                           zero_centered_gamma));
  }
  const Tensor normed =
      normalized_by_torch(input, norm_weight, norm_bias, eps, rms, zero_centered_gamma);
  return for_each_weight(linear, normed, weights, biases, format);
}

std::vector<Tensor> norm_linear_autograd(const Tensor& input, const Tensor& norm_weight,
                                         const OptionalTensor& norm_bias, at::TensorList weights,
                                         const std::optional<std::vector<Tensor>>& biases,
                                         double eps, bool rms, bool zero_centered_gamma,
                                         std::optional<c10::string_view> format) {
  check_norm_linear(input, norm_weight, norm_bias, weights, biases, rms);
  if (norm_linear_reads_codes(input, norm_weight, norm_bias, weights)) {
    const at::TensorList given_biases = biases ? at::TensorList(*biases) : at::TensorList();
    return NormLinearFunction::apply(input, norm_weight, norm_bias, weights, given_biases, eps, rms,
                                     zero_centered_gamma);
  }
  const Tensor normed =
      normalized_by_torch(input, norm_weight, norm_bias, eps, rms, zero_centered_gamma);
  return for_each_weight(linear_autograd, normed, weights, biases, format);
}

}  // namespace qshard
