// swiglu_mlp as one autograd function: what passes between its linears is saved and handed on in
// codes. Where GEMMs read none it is the composition of linear, silu and mul, which saves neither
// silu(gate) nor the product.
#include "dispatch/parts/kernel_bridge.h"
#include "ops/linear/autograd.h"
#include "ops/linear/norm_linear.h"
#include "ops/linear/normed_input.h"
#include "ops/mlp/swiglu_mlp_arguments.h"

namespace qshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Edges are numbered by the tensors that forward was given, without undefined ones.
struct Edges {
  size_t input = 0, gate = 1, down = 2, up = 3;
  size_t gate_bias, up_bias, down_bias, residual, norm_weight, norm_bias;

  Edges(bool has_up, bool has_gate_bias, bool has_up_bias, bool has_down_bias, bool has_residual)
      : gate_bias(has_up ? 4 : 3),
        up_bias(gate_bias + (has_gate_bias ? 1 : 0)),
        down_bias(up_bias + (has_up_bias ? 1 : 0)),
        residual(down_bias + (has_down_bias ? 1 : 0)),
        norm_weight(residual + (has_residual ? 1 : 0)),
        norm_bias(norm_weight + 1) {}
};

/// Which gradients backward may be asked for.
struct SwigluNeeds {
  bool entered = false;  // of what gate and up multiply
  LinearNeeds gate, up;
  bool gate_values = false;
  bool inner = false;  // of the values of gate and up
  LinearNeeds down;

  SwigluNeeds(bool records, std::initializer_list<OptionalTensor> entering, const Tensor& gate,
              const OptionalTensor& up, const Tensor& down, const OptionalTensor& gate_bias,
              const OptionalTensor& up_bias)
      : entered(records && any_trained(entering)),
        gate(records, entered, gate),
        up(records, entered, is_given(up) ? *up : gate),
        gate_values(records && (entered || any_trained({gate, gate_bias}))),
        inner(records && (gate_values || any_trained({up, up_bias}))),
        down(records, inner, down) {}

 private:
  static bool any_trained(std::initializer_list<OptionalTensor> tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const OptionalTensor& tensor) {
      return is_given(tensor) && tensor->requires_grad();
    });
  }
};

/// What gate and up make of the input, and what their gradients read of it.
struct FirstLinears {
  Tensor gate_values, up_values;
  Tensor gate_input, up_input;
  bool gate_saves_codes = true, up_saves_codes = true;
  std::optional<NormedInput> normed;  // instead of gate_input and up_input

  FirstLinears(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
               const OptionalTensor& gate_bias, const OptionalTensor& up_bias, bool weight_only,
               bool records_grad, const SwigluNeeds& needs, bool checks_format,
               c10::string_view format, WeightState gate_state, WeightState up_state) {
    static const auto quantize = typed_op<decltype(quantize_input_op)>("qshard::quantize_input");
    static const auto linear = typed_op<decltype(linear_forward_op)>("qshard::linear_forward");
    const InputUse of_gate(input, gate, needs.gate, weight_only, format);
    const InputUse of_up(input, is_given(up) ? *up : gate, needs.up, weight_only, format);
    OptionalTensor rows;
    Tensor columns;
    const bool apart = of_gate.quantizes_apart || of_up.quantizes_apart;
    if (apart) {
      auto codes = quantize.call(input, format, of_gate.multiplies_codes,
                                 of_gate.saves_codes || of_up.saves_codes);
      if (of_gate.multiplies_codes) rows = std::get<0>(codes);
      columns = std::get<1>(codes);
    }
    std::optional<ShareInputCodes> share;
    if (records_grad && input.is_cuda()) share.emplace(input);
    const bool needs_name = apart || checks_format;
    const auto run = [&](const Tensor& weight, const OptionalTensor& bias, const InputUse& of,
                         const LinearNeeds& needs, WeightState state) {
      auto [output, saved] =
          linear.call(input, weight, bias, of.saves_codes && !apart, weight_only, rows,
                      needs_name ? OptionalFormat(format) : std::nullopt, state, std::nullopt);
      const Tensor& kept = !of.saves_codes ? input : apart ? columns : saved;
      return std::pair{output, needs.reads_input() ? kept : Tensor()};
    };
    std::tie(gate_values, gate_input) = run(gate, gate_bias, of_gate, needs.gate, gate_state);
    if (is_given(up)) std::tie(up_values, up_input) = run(*up, up_bias, of_up, needs.up, up_state);
    gate_saves_codes = of_gate.saves_codes;
    up_saves_codes = of_up.saves_codes;
  }

  /// For norm(input), whose codes the weights read.
  FirstLinears(const Tensor& input, const NormArguments& norm, const Tensor& gate,
               const OptionalTensor& up, const OptionalTensor& gate_bias,
               const OptionalTensor& up_bias, c10::string_view format) {
    variable_list weights{gate};
    variable_list biases;
    if (is_given(up)) weights.push_back(*up);
    for (const auto& bias : {gate_bias, up_bias}) {
      if (is_given(bias)) biases.push_back(*bias);
    }
    auto [values, kept] = NormedInput::multiply(input, norm, weights, biases, std::string(format));
    gate_values = values[0];
    if (is_given(up)) up_values = values[1];
    normed = std::move(kept);
  }
};

struct SwigluMlpFunction : Function<SwigluMlpFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& gate,
                        const Tensor& down, const OptionalTensor& up,
                        const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                        const OptionalTensor& down_bias, const OptionalTensor& residual,
                        const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                        double eps, bool rms, bool zero_centered_gamma, bool weight_only,
                        bool records_grad, c10::string_view gate_name, c10::string_view down_name,
                        WeightState gate_state, WeightState up_state, WeightState down_state) {
    at::AutoDispatchBelowAutograd guard;
    static const auto second =
        typed_op<decltype(swiglu_linear_forward)>("qshard::swiglu_linear_forward");
    const bool is_joined = !is_given(up);
    // What is traced hides its format, and a plain weight has none.
    const bool is_dynamic = gate_state.has_value();
    const bool needs_name = is_dynamic || input.key_set().has(c10::DispatchKey::Python);
    const Format& format = format_of(gate, gate_name);
    TORCH_CHECK(
        is_joined || &format_of(*up, gate_name) == &format,
        fmt::format("qshard::swiglu_mlp: gate is a {} weight and up a {} one; quantize both "
                    "by one recipe, or call qshard::linear for each",
                    format.name, is_joined ? "" : format_of(*up, gate_name).name));
    const SwigluUse use(input, gate, down, weight_only, format, format_of(down, down_name));

    const bool is_normed = is_given(norm_weight);
    const SwigluNeeds needs(records_grad, {input, norm_weight, norm_bias}, gate, up, down,
                            gate_bias, up_bias);
    const KeptWeight kept_gate(gate, needs.gate.reads_weight(), gate_name, gate_state);
    const KeptWeight kept_up(is_joined ? gate : *up, needs.up.reads_weight(), gate_name, up_state);
    const KeptWeight kept_down(down, needs.down.reads_weight(), down_name, down_state);
    const bool checks_format = is_dynamic || kept_gate.trusts_format() || kept_up.trusts_format();
    const FirstLinears first =
        is_normed ? FirstLinears(input, {*norm_weight, norm_bias, eps, rms, zero_centered_gamma},
                                 gate, up, gate_bias, up_bias, gate_name)
                  : FirstLinears(input, gate, up, gate_bias, up_bias, weight_only, records_grad,
                                 needs, checks_format, gate_name, gate_state, up_state);
    const auto halves = is_joined ? first.gate_values.chunk(2, -1)
                                  : variable_list{first.gate_values, first.up_values};
    auto [output, maxima] = second.call(
        halves[0], halves[1], down, down_bias, use.keeps_maxima, weight_only,
        needs_name || kept_down.trusts_format() ? OptionalFormat(down_name) : std::nullopt,
        down_state, residual);
    const bool reads_values = needs.inner || needs.down.weight;
    // up's gradient reads gate alone.
    const bool reads_up = needs.gate_values || needs.down.weight;
    variable_list saved{first.gate_input, first.up_input,
                        reads_values ? first.gate_values : Tensor(),
                        reads_up ? first.up_values : Tensor(), reads_values ? maxima : Tensor()};
    kept_gate.save(ctx, "gate_", saved);
    kept_up.save(ctx, "up_", saved);
    kept_down.save(ctx, "down_", saved);
    if (is_normed) {
      variable_list weights{gate};
      if (!is_joined) weights.push_back(*up);
      first.normed->save(ctx, {records_grad, input, *norm_weight, norm_bias, weights}, saved);
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["is_joined"] = is_joined;
    ctx->saved_data["is_normed"] = is_normed;
    ctx->saved_data["adds_input"] = is_normed && is_given(residual) && residual->is_same(input);
    ctx->saved_data["gate_saves_codes"] = first.gate_saves_codes;
    ctx->saved_data["up_saves_codes"] = first.up_saves_codes;
    ctx->saved_data["weight_only"] = weight_only;
    ctx->saved_data["gives_codes"] = use.gives_codes;
    ctx->saved_data["grad_format"] = format.name;
    const auto note = [&](const char* name, const OptionalTensor& bias) {
      if (is_given(bias)) ctx->saved_data[name] = bias->scalar_type();
    };
    note("gate_bias", gate_bias);
    note("up_bias", up_bias);
    note("down_bias", down_bias);
    ctx->saved_data["has_residual"] = is_given(residual);
    return output;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(kArguments);
    refuse_double_backward(grad, "qshard::swiglu_mlp");
    const auto saved = ctx->get_saved_variables();
    const Tensor& gate_values = saved[kGateValues];
    const bool is_joined = ctx->saved_data["is_joined"].toBool();
    const auto has = [&](const char* name) { return ctx->saved_data.count(name) > 0; };
    const bool has_residual = ctx->saved_data["has_residual"].toBool();
    const Edges edge(!is_joined, has("gate_bias"), has("up_bias"), has("down_bias"), has_residual);
    const bool is_normed = ctx->saved_data["is_normed"].toBool();
    std::optional<NormedInput> normed;
    if (is_normed) normed = NormedInput::restore(ctx, &saved[kSavedNorm]);
    const bool needs_norm_weight = is_normed && ctx->needs_input_grad(edge.norm_weight);
    const bool needs_norm_bias =
        is_normed && normed->has_bias() && ctx->needs_input_grad(edge.norm_bias);
    const bool needs_norm = needs_norm_weight || needs_norm_bias;
    const bool needs_input = ctx->needs_input_grad(edge.input) || needs_norm;
    const bool needs_gate = ctx->needs_input_grad(edge.gate);
    const bool needs_up = !is_joined && ctx->needs_input_grad(edge.up);
    const bool needs_down = ctx->needs_input_grad(edge.down);
    const bool needs_gate_bias = has("gate_bias") && ctx->needs_input_grad(edge.gate_bias);
    const bool needs_up_bias = has("up_bias") && ctx->needs_input_grad(edge.up_bias);
    const bool needs_bias = needs_gate_bias || needs_up_bias;
    const bool weight_only = ctx->saved_data["weight_only"].toBool();
    // Gradients of biases are sums of values.
    const bool gives_codes = ctx->saved_data["gives_codes"].toBool() && !needs_bias;
    const std::string grad_format = ctx->saved_data["grad_format"].toStringRef();
    auto* node = evaluated_node<SwigluMlpFunction>(ctx);

    variable_list result(kArguments);
    // That of an input which is the residual, too, is added to the norm's as this is written.
    const bool adds_input = ctx->saved_data["adds_input"].toBool();
    if (has_residual && !adds_input && ctx->needs_input_grad(edge.residual)) {
      result[kResidual] = grad;
    }
    at::AutoDispatchBelowAutograd guard;
    std::array<Tensor, 4> inner;  // of gate and of up: values, or codes and columns of codes
    const bool needs_weights = needs_gate || needs_up || needs_bias;
    if (needs_input || needs_weights || needs_down) {
      const auto halves =
          is_joined ? gate_values.chunk(2, -1)
                    : variable_list{gate_values,
                                    saved[kUpValues].defined() ? saved[kUpValues] : gate_values};
      const RestoredWeight kept(ctx, "down_", &saved[kSavedDown], grad);
      const Tensor& down = kept.weight;
      const WeightGrad into(needs_down ? node : nullptr, edge.down, down, grad, gate_values);
      const auto format = gives_codes ? OptionalFormat(grad_format) : std::nullopt;
      if (into.leaf.sum.defined()) {
        static const auto op = typed_op<decltype(swiglu_linear_backward_accumulate)>(
            "qshard::swiglu_linear_backward_accumulate");
        std::tie(inner[0], inner[1], inner[2], inner[3]) = op.call(
            grad, halves[0], halves[1], down, saved[kMaxima], into.leaf.sum, needs_input,
            needs_weights, is_joined, format, weight_only, OptionalFormat(kept.format), kept.state);
      } else {
        static const auto op =
            typed_op<decltype(swiglu_linear_backward)>("qshard::swiglu_linear_backward");
        Tensor grad_down;
        std::tie(grad_down, inner[0], inner[1], inner[2], inner[3]) =
            op.call(grad, halves[0], halves[1], down, saved[kMaxima], needs_down, needs_input,
                    needs_weights, is_joined, format, weight_only, into.dtype,
                    OptionalFormat(kept.format), kept.state);
        if (needs_down) result[kDown] = grad_down;
      }
      if (!needs_input && !needs_weights) inner = {};
    }
    if (has("down_bias") && ctx->needs_input_grad(edge.down_bias)) {
      result[kDownBias] = bias_gradient(grad, ctx->saved_data["down_bias"].toScalarType());
    }
    if (!inner[0].defined()) {
      if (adds_input && ctx->needs_input_grad(edge.input)) result[kInput] = grad;
      return result;
    }

    Tensor columns;  // of what is normalized
    if (is_normed && (needs_gate || needs_up)) columns = normed->columns();
    const auto first = [&](size_t matrix, const char* key, bool saves_codes, bool needs_weight,
                           size_t weight_edge, Tensor& grad_weight,
                           const OptionalTensor& input_sum) {
      if (!needs_input && !needs_weight) return Tensor();
      const Tensor& rows = inner[2 * matrix];
      const Tensor& columns_of_grad = inner[2 * matrix + 1];
      const RestoredWeight kept(ctx, key, &saved[kSavedGate + matrix * KeptWeight::kSaved], grad);
      const Tensor& weight = kept.weight;
      const Tensor& input = restored_input(is_normed ? columns : saved[matrix], gate_values);
      const bool is_quantized = saves_codes && needs_weight;
      const WeightGrad into(needs_weight ? node : nullptr, weight_edge, weight, rows, input);
      const Tensor& sum = into.leaf.sum;
      const auto dtype = gate_values.scalar_type();
      const auto size = gate_values.sizes();
      const OptionalFormat name(kept.format);
      if (gives_codes && sum.defined()) {
        static const auto op = typed_op<decltype(linear_backward_codes_accumulate)>(
            "qshard::linear_backward_codes_accumulate");
        return op.call(rows, columns_of_grad, size, dtype, weight, input, is_quantized, needs_input,
                       sum, name, kept.state, input_sum);
      }
      Tensor grad_input, made;
      if (gives_codes) {
        static const auto op =
            typed_op<decltype(linear_backward_codes)>("qshard::linear_backward_codes");
        std::tie(grad_input, made) =
            op.call(rows, columns_of_grad, size, dtype, weight, input, is_quantized, needs_input,
                    needs_weight, into.dtype, name, kept.state, input_sum);
      } else {
        std::tie(grad_input, made) = linear_gradients(into, rows, kept, input, is_quantized,
                                                      needs_input, needs_weight, weight_only);
      }
      if (needs_weight) grad_weight = made;
      return grad_input;
    };
    Tensor grad_input = first(0, "gate_", ctx->saved_data["gate_saves_codes"].toBool(), needs_gate,
                              edge.gate, result[kGate], std::nullopt);
    if (!is_joined) {
      // Nothing else refers to it yet.
      const bool is_added = needs_input && gives_codes && !is_traced_or_subclass(grad_input);
      const Tensor other =
          first(1, "up_", ctx->saved_data["up_saves_codes"].toBool(), needs_up, edge.up,
                result[kUp], is_added ? OptionalTensor(grad_input) : std::nullopt);
      if (needs_input && !is_added) grad_input = grad_input + other;
    }
    columns.reset();
    if (is_normed && needs_input) {
      std::tie(grad_input, result[kNormWeight], result[kNormBias]) =
          normed->backward(grad_input, adds_input ? grad : Tensor(), needs_norm);
      if (!needs_norm_weight) result[kNormWeight].reset();
      if (!needs_norm_bias) result[kNormBias].reset();
    }
    if (ctx->needs_input_grad(edge.input)) result[kInput] = grad_input;
    if (needs_gate_bias) {
      result[kGateBias] = bias_gradient(inner[0], ctx->saved_data["gate_bias"].toScalarType());
    }
    if (needs_up_bias) {
      result[kUpBias] = bias_gradient(inner[2], ctx->saved_data["up_bias"].toScalarType());
    }
    return result;
  }

 private:
  // Arguments of forward.
  enum : size_t {
    kInput,
    kGate,
    kDown,
    kUp,
    kGateBias,
    kUpBias,
    kDownBias,
    kResidual,
    kNormWeight,
    kNormBias,
    kArguments = 20
  };
  // What is saved.
  enum : size_t {
    kGateInput,
    kUpInput,
    kGateValues,
    kUpValues,
    kMaxima,
    kSavedGate,
    kSavedUp = kSavedGate + KeptWeight::kSaved,
    kSavedDown = kSavedUp + KeptWeight::kSaved,
    kSavedNorm = kSavedDown + KeptWeight::kSaved,
  };
};

/// The composition, where down alone is trained: autograd then keeps what down multiplies, and
/// nothing of gate and up. Their linears record nothing.
Tensor down_of_product(const variable_list& values, const Tensor& down,
                       const OptionalTensor& down_bias, bool weight_only,
                       c10::string_view down_format, WeightState down_state,
                       const OptionalTensor& residual) {
  const auto halves = values.size() == 1 ? values[0].chunk(2, -1) : values;
  const Tensor product = at::silu(halves[0]) * halves[1];
  return linear_autograd(product, down, down_bias, weight_only, down_format, down_state, residual);
}

}  // namespace

Tensor swiglu_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                  const Tensor& down, const OptionalTensor& gate_bias,
                  const OptionalTensor& up_bias, const OptionalTensor& down_bias, bool weight_only,
                  c10::string_view format, c10::string_view down_format, WeightState gate_state,
                  WeightState up_state, WeightState down_state, const OptionalTensor& residual,
                  const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps,
                  bool rms, bool zero_centered_gamma) {
  check_swiglu_mlp(input, gate, up, down, gate_bias, up_bias, down_bias);
  check_format_name(gate, format, "qshard::swiglu_mlp");
  check_format_name(down, down_format, "qshard::swiglu_mlp");
  check_norm(input, norm_weight, norm_bias, rms);
  const bool is_dynamic = are_dynamic(up, gate_state, up_state, down_state);
  const Tensor x =
      is_given(norm_weight)
          ? normalized_by_torch(input, {*norm_weight, norm_bias, eps, rms, zero_centered_gamma})
          : input;
  const auto quantized = [&](const Tensor& weight, c10::string_view name) {
    return !is_dynamic && is_quantized_on_use(weight, name)
               ? quantize(weight, name, false, std::nullopt, 0)
               : weight;
  };
  const auto name_of_plain = [&](c10::string_view name) {
    return is_dynamic ? OptionalFormat(name) : std::nullopt;
  };
  const auto first = [&](const Tensor& weight, const OptionalTensor& bias, WeightState state) {
    return std::get<0>(linear_forward_op(x, quantized(weight, format), bias, false, weight_only,
                                         std::nullopt, name_of_plain(format), state));
  };
  const Tensor gate_values = first(gate, gate_bias, gate_state);
  const auto halves = is_given(up) ? std::vector<Tensor>{gate_values, first(*up, up_bias, up_state)}
                                   : gate_values.chunk(2, -1);
  return std::get<0>(swiglu_linear_forward(halves[0], halves[1], quantized(down, down_format),
                                           down_bias, /*keep_maxima=*/false, weight_only,
                                           name_of_plain(down_format), down_state, residual));
}

Tensor swiglu_mlp_autograd(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const Tensor& down, const OptionalTensor& gate_bias,
                           const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                           bool weight_only, c10::string_view format, c10::string_view down_format,
                           WeightState gate_state, WeightState up_state, WeightState down_state,
                           const OptionalTensor& residual, const OptionalTensor& norm_weight,
                           const OptionalTensor& norm_bias, double eps, bool rms,
                           bool zero_centered_gamma) {
  check_swiglu_mlp(input, gate, up, down, gate_bias, up_bias, down_bias);
  check_format_name(gate, format, "qshard::swiglu_mlp");
  check_format_name(down, down_format, "qshard::swiglu_mlp");
  check_norm(input, norm_weight, norm_bias, rms);
  const bool is_dynamic = are_dynamic(up, gate_state, up_state, down_state);
  const auto quantized = [&](const Tensor& weight, c10::string_view name) {
    return !is_dynamic && is_quantized_on_use(weight, name)
               ? quantize_autograd(weight, name, false, std::nullopt, 0)
               : weight;
  };
  const Tensor first = quantized(gate, format);
  const OptionalTensor second =
      is_given(up) ? OptionalTensor(quantized(*up, format)) : std::nullopt;
  const bool in_codes = reads_normed_codes(input, norm_weight, norm_bias, first, second, gate_bias,
                                           up_bias, weight_only, is_dynamic, format);
  const Tensor x =
      is_given(norm_weight) && !in_codes
          ? normalized_by_torch(input, {*norm_weight, norm_bias, eps, rms, zero_centered_gamma})
          : input;
  const bool records = at::GradMode::is_enabled();
  const SwigluNeeds needs(records, {input, norm_weight, norm_bias}, first, second, down, gate_bias,
                          up_bias);
  if (needs.down.weight && !needs.inner) {
    variable_list values;
    if (in_codes) {
      variable_list weights{first};
      if (second) weights.push_back(*second);
      std::optional<variable_list> biases;
      if (is_given(gate_bias)) biases.emplace({*gate_bias});
      if (second && biases) biases->push_back(*up_bias);
      values = norm_linear_autograd(input, *norm_weight, norm_bias, weights, biases, eps, rms,
                                    zero_centered_gamma, format, /*with_input=*/false);
    } else {
      values.push_back(linear_autograd(x, first, gate_bias, weight_only, format, gate_state));
      if (second) {
        values.push_back(linear_autograd(x, *second, up_bias, weight_only, format, up_state));
      }
    }
    return down_of_product(values, quantized(down, down_format), down_bias, weight_only,
                           down_format, down_state, residual);
  }
  const auto if_in_codes = [&](const OptionalTensor& tensor) {
    return in_codes ? tensor : std::nullopt;
  };
  return SwigluMlpFunction::apply(
      x, first, quantized(down, down_format), second, gate_bias, up_bias, down_bias, residual,
      if_in_codes(norm_weight), if_in_codes(norm_bias), eps, rms, zero_centered_gamma, weight_only,
      records, format, down_format, gate_state, up_state, down_state);
}

}  // namespace qshard
