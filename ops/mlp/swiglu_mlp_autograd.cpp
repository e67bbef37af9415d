// swiglu_mlp as one autograd function: what passes between its linears is saved and handed on in
// codes. Where GEMMs read none it is the composition of linear, silu and mul, which saves neither
// silu(gate) nor the product.
#include "dispatch/parts/kernel_bridge.h"
#include "kernels/grouped/grouped_mlp.h"
#include "kernels/grouped/shared_codes.h"
#include "kernels/linear/swiglu_operand.h"
#include "ops/linear/autograd.h"
#include "ops/linear/grouped_linear.h"
#include "ops/linear/norm_linear.h"
#include "ops/linear/normed_input.h"
#include "ops/mlp/swiglu_mlp_arguments.h"
#include "ops/mlp/swiglu_mlp_backward.h"

namespace qshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

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
               c10::string_view format, const WeightState& gate_state, const WeightState& up_state,
               const OptionalTensor& offs) {
    static const auto quantize = typed_op<decltype(quantize_input_op)>("qshard::quantize_input");
    static const auto linear = typed_op<decltype(linear_forward_op)>("qshard::linear_forward");
    const auto use_of = [&](const Tensor& weight, const LinearNeeds& linear) {
      return is_given(offs) ? input_use_of_experts(input, weight, linear, weight_only)
                            : InputUse(input, weight, linear, weight_only, format);
    };
    const InputUse of_gate = use_of(gate, needs.gate);
    const InputUse of_up = use_of(is_given(up) ? *up : gate, needs.up);
    OptionalTensor rows;
    Tensor columns;
    const bool apart = of_gate.quantizes_apart || of_up.quantizes_apart;
    if (apart) {
      auto codes = quantize.call(input, format, of_gate.multiplies_codes,
                                 of_gate.saves_codes || of_up.saves_codes);
      if (of_gate.multiplies_codes) rows = std::get<0>(codes);
      columns = std::get<1>(codes);
    }
    std::optional<InputCodeScope> share;
    if (records_grad && input.is_cuda()) share.emplace(input);
    std::optional<SharedGroupCodes> share_groups;
    if (is_given(offs)) share_groups.emplace();
    const bool needs_name = apart || checks_format;
    const auto run = [&](const Tensor& weight, const OptionalTensor& bias, const InputUse& of,
                         const LinearNeeds& needs, const WeightState& state) {
      auto [output, saved] = linear.call(input, weight, bias, of.saves_codes && !apart, weight_only,
                                         rows, needs_name ? OptionalFormat(format) : std::nullopt,
                                         state, std::nullopt, offs);
      const Tensor& kept = !of.saves_codes ? input : apart ? columns : saved;
      return std::pair{output, needs.reads_input() ? kept : Tensor()};
    };
    std::tie(gate_values, gate_input) = run(gate, gate_bias, of_gate, needs.gate, gate_state);
    gate_saves_codes = of_gate.saves_codes;
    up_saves_codes = of_up.saves_codes;
    if (!is_given(up)) return;
    std::tie(up_values, up_input) = run(*up, up_bias, of_up, needs.up, up_state);
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

std::optional<at::ScalarType> dtype_of(const OptionalTensor& tensor) {
  return is_given(tensor) ? std::optional(tensor->scalar_type()) : std::nullopt;
}

/// Whether the gradients of experts' gate and up pass in codes.
SwigluUse swiglu_use_of_experts(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                                const Tensor& down, bool weight_only) {
  SwigluUse use;
  const auto is_weight = [](const Tensor& weight) {
    return has_key(weight) && !is_traced_or_subclass(weight) && is_stack(weight);
  };
  if (!input.is_cuda() || is_traced_or_subclass(input) || !is_weight(gate) || !is_weight(down) ||
      (is_given(up) && !is_weight(*up))) {
    return use;
  }
  constexpr const char* kOp = "qshard::swiglu_experts";
  use.gives_codes = has_grouped_mlp_backward(input, expert_weights(gate, kOp),
                                             expert_weights(down, kOp), !is_given(up), weight_only);
  return use;
}

/// Whether the codes of experts' silu(gate) * up that wgrad of down reads are kept, in the place of
/// maxima. Without them backward makes the product again.
bool keeps_product_codes(const Tensor& input, const Tensor& gate_values, const Tensor& down,
                         const SwigluNeeds& needs, bool weight_only) {
  LinearNeeds of_down = needs.down;
  of_down.input = needs.inner;
  return !is_traced_or_subclass(input) &&
         input_use_of_experts(gate_values, down, of_down, weight_only).saves_codes;
}

struct SwigluMlpFunction : Function<SwigluMlpFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& gate,
                        const Tensor& down, const OptionalTensor& up,
                        const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                        const OptionalTensor& down_bias, const OptionalTensor& residual,
                        const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                        double eps, bool rms, bool zero_centered_gamma, bool weight_only,
                        bool records_grad, c10::string_view gate_name, c10::string_view down_name,
                        const WeightState& gate_state, const WeightState& up_state,
                        const WeightState& down_state, const OptionalTensor& offs,
                        c10::string_view activation) {
    at::AutoDispatchBelowAutograd guard;
    static const auto second =
        typed_op<decltype(swiglu_linear_forward)>("qshard::swiglu_linear_forward");
    const bool has_up = is_given(up);
    const bool is_joined = !has_up && mlp_activation("qshard::swiglu_mlp", activation).gated;
    // What is traced hides its format, and a plain weight has none.
    const bool is_dynamic = gate_state.has_value();
    const bool needs_name = is_dynamic || input.key_set().has(c10::DispatchKey::Python);
    const Format& format = format_of(gate, gate_name);
    TORCH_CHECK(
        !has_up || &format_of(*up, gate_name) == &format,
        fmt::format("qshard::swiglu_mlp: gate is a {} weight and up a {} one; quantize both "
                    "by one recipe, or call qshard::linear for each",
                    format.name, has_up ? format_of(*up, gate_name).name : ""));
    const SwigluUse use = is_given(offs) ? swiglu_use_of_experts(input, gate, up, down, weight_only)
                                         : SwigluUse(input, gate, down, weight_only, format,
                                                     format_of(down, down_name));

    const bool is_normed = is_given(norm_weight);
    const SwigluNeeds needs(records_grad, {input, norm_weight, norm_bias}, gate, up, down,
                            gate_bias, up_bias);
    const Tensor& up_or_gate = has_up ? *up : gate;
    const KeptWeight kept_gate(gate, needs.gate.reads_weight(gate, offs), gate_name, gate_state);
    const KeptWeight kept_up(up_or_gate, needs.up.reads_weight(up_or_gate, offs), gate_name,
                             up_state);
    const KeptWeight kept_down(down, needs.down.reads_weight(down, offs), down_name, down_state);
    const bool checks_format = is_dynamic || kept_gate.trusts_format() || kept_up.trusts_format();
    const FirstLinears first =
        is_normed ? FirstLinears(input, {*norm_weight, norm_bias, eps, rms, zero_centered_gamma},
                                 gate, up, gate_bias, up_bias, gate_name)
                  : FirstLinears(input, gate, up, gate_bias, up_bias, weight_only, records_grad,
                                 needs, checks_format, gate_name, gate_state, up_state, offs);
    const GateAndUp values(first.gate_values, first.up_values, is_joined);
    const bool keeps =
        is_given(offs)
            ? !use.gives_codes && keeps_product_codes(input, values.gate, down, needs, weight_only)
            : use.keeps_maxima;
    auto [output, maxima] = second.call(
        values.gate, values.up, down, down_bias, keeps, weight_only,
        needs_name || kept_down.trusts_format() ? OptionalFormat(down_name) : std::nullopt,
        down_state, residual, offs, activation);
    const bool reads_values = needs.inner || needs.down.weight;
    // up's gradient reads gate alone.
    const bool reads_up = needs.gate_values || needs.down.weight;
    variable_list saved{first.gate_input, first.up_input,
                        reads_values ? first.gate_values : Tensor(),
                        reads_up ? first.up_values : Tensor(), reads_values ? maxima : Tensor()};
    SwigluMlpState state{.is_joined = is_joined,
                         .has_up = has_up,
                         .has_residual = is_given(residual),
                         .adds_input = is_normed && is_given(residual) && residual->is_same(input),
                         .gate_saves_codes = first.gate_saves_codes,
                         .up_saves_codes = first.up_saves_codes,
                         .weight_only = weight_only,
                         .gives_codes = use.gives_codes,
                         .grad_format = std::string(format.name),
                         .activation = std::string(activation),
                         .gate_bias = dtype_of(gate_bias),
                         .up_bias = dtype_of(up_bias),
                         .down_bias = dtype_of(down_bias),
                         .gate = kept_gate.save(saved),
                         .up = kept_up.save(saved),
                         .down = kept_down.save(saved)};
    if (is_given(offs)) saved.push_back(*offs);
    if (is_normed) {
      variable_list weights{gate};
      if (has_up) weights.push_back(*up);
      state.norm =
          first.normed->save({records_grad, input, *norm_weight, norm_bias, weights}, saved);
    }
    save_state(ctx, std::move(state));
    ctx->save_for_backward(std::move(saved));
    return output;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(kArguments);
    refuse_double_backward(grad, "qshard::swiglu_mlp");
    return SwigluMlpBackward(ctx, evaluated_node<SwigluMlpFunction>(ctx), grad).run();
  }
};

/// The composition, where down alone is trained: autograd then keeps what down multiplies, and
/// nothing of gate and up. Their linears record nothing.
Tensor down_of_product(const variable_list& values, const Tensor& down,
                       const OptionalTensor& down_bias, bool weight_only,
                       c10::string_view down_format, const WeightState& down_state,
                       const OptionalTensor& residual, MlpActivation activation) {
  const bool has_up = values.size() > 1;
  const GateAndUp of(values[0], has_up ? values[1] : Tensor(), activation.gated && !has_up);
  const Tensor product = swiglu_values(of.gate, of.up.value_or(Tensor()), activation.function);
  return linear_autograd(product, down, down_bias, weight_only, down_format, down_state, residual);
}

}  // namespace

Tensor swiglu_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                  const Tensor& down, const OptionalTensor& gate_bias,
                  const OptionalTensor& up_bias, const OptionalTensor& down_bias, bool weight_only,
                  c10::string_view format, c10::string_view down_format,
                  const WeightState& gate_state, const WeightState& up_state,
                  const WeightState& down_state, const OptionalTensor& residual,
                  const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps,
                  bool rms, bool zero_centered_gamma, c10::string_view activation) {
  const bool gated =
      check_swiglu_mlp(input, gate, up, down, gate_bias, up_bias, down_bias, activation).gated;
  check_format_name(gate, format, "qshard::swiglu_mlp");
  check_format_name(down, down_format, "qshard::swiglu_mlp");
  check_norm(input, norm_weight, norm_bias, rms);
  const bool is_dynamic = are_dynamic(up, gate_state, up_state, down_state);
  const Tensor x =
      is_given(norm_weight)
          ? normalized_by_torch(input, {*norm_weight, norm_bias, eps, rms, zero_centered_gamma})
          : input;
  const auto quantized = [&](const Tensor& weight, c10::string_view name) {
    return is_dynamic ? weight : quantized_on_use(weight, name);
  };
  const auto name_of_plain = [&](c10::string_view name) {
    return is_dynamic ? OptionalFormat(name) : std::nullopt;
  };
  const auto first = [&](const Tensor& weight, const OptionalTensor& bias,
                         const WeightState& state) {
    return std::get<0>(linear_forward_op(x, quantized(weight, format), bias, false, weight_only,
                                         std::nullopt, name_of_plain(format), state));
  };
  const Tensor gate_values = first(gate, gate_bias, gate_state);
  const Tensor up_values = is_given(up) ? first(*up, up_bias, up_state) : Tensor();
  const GateAndUp values(gate_values, up_values, gated && !is_given(up));
  return std::get<0>(swiglu_linear_forward(
      values.gate, values.up, quantized(down, down_format), down_bias, /*keep_maxima=*/false,
      weight_only, name_of_plain(down_format), down_state, residual, std::nullopt, activation));
}

Tensor swiglu_mlp_autograd(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const Tensor& down, const OptionalTensor& gate_bias,
                           const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                           bool weight_only, c10::string_view format, c10::string_view down_format,
                           const WeightState& gate_state, const WeightState& up_state,
                           const WeightState& down_state, const OptionalTensor& residual,
                           const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                           double eps, bool rms, bool zero_centered_gamma,
                           c10::string_view activation) {
  const MlpActivation known =
      check_swiglu_mlp(input, gate, up, down, gate_bias, up_bias, down_bias, activation);
  check_format_name(gate, format, "qshard::swiglu_mlp");
  check_format_name(down, down_format, "qshard::swiglu_mlp");
  check_norm(input, norm_weight, norm_bias, rms);
  const bool is_dynamic = are_dynamic(up, gate_state, up_state, down_state);
  const auto quantized = [&](const Tensor& weight, c10::string_view name) {
    return is_dynamic ? weight : quantized_on_use_autograd(weight, name);
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
                           down_format, down_state, residual, known);
  }
  const auto if_in_codes = [&](const OptionalTensor& tensor) {
    return in_codes ? tensor : std::nullopt;
  };
  return SwigluMlpFunction::apply(
      x, first, quantized(down, down_format), second, gate_bias, up_bias, down_bias, residual,
      if_in_codes(norm_weight), if_in_codes(norm_bias), eps, rms, zero_centered_gamma, weight_only,
      records, format, down_format, gate_state, up_state, down_state, std::nullopt, activation);
}

Tensor swiglu_experts_autograd(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                               const Tensor& down, const Tensor& offs, bool weight_only,
                               OptionalFormat format, OptionalFormat down_format) {
  constexpr const char* kOp = "qshard::swiglu_experts";
  check_swiglu_experts(input, gate, up, down, offs);
  check_format_name(gate, format, kOp);
  if (is_given(up)) check_format_name(*up, format, kOp);
  check_format_name(down, down_format, kOp);
  const Tensor first = quantized_on_use_autograd(gate, format);
  const OptionalTensor second =
      is_given(up) ? OptionalTensor(quantized_on_use_autograd(*up, format)) : std::nullopt;
  const bool records = at::GradMode::is_enabled();
  const SwigluNeeds needs(records, {input}, first, second, down, {}, {});
  if (needs.down.weight && !needs.inner) {  // autograd keeps what down multiplies, and nothing else
    const auto values_of = [&](const Tensor& weight) {
      return grouped_linear_autograd(input, weight, offs, weight_only, format);
    };
    const GateAndUp of(values_of(first), second ? values_of(*second) : Tensor(),
                       /*is_joined=*/!second);
    return grouped_linear_autograd(swiglu_values(of.gate, *of.up), down, offs, weight_only,
                                   down_format);
  }
  const auto name = [&](const Tensor& weight, OptionalFormat given) {
    TORCH_CHECK(given || has_key(weight), kOp, ": a weight is ", describe(weight),
                "; name the formats of plain weights, and in compiled code of all, as format and "
                "down_format");
    return given ? *given : c10::string_view(format_of(weight, "").name);
  };
  const std::optional<std::vector<Tensor>> state;
  return SwigluMlpFunction::apply(
      input, first, quantized_on_use_autograd(down, down_format), second, OptionalTensor(),
      OptionalTensor(), OptionalTensor(), OptionalTensor(), OptionalTensor(), OptionalTensor(), 0.,
      false, false, weight_only, records, name(first, format), name(down, down_format), state,
      state, state, OptionalTensor(offs), kSwiglu);
}

}  // namespace qshard
