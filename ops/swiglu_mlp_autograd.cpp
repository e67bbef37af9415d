// swiglu_mlp as one autograd function: what passes between its linears is saved and handed on in
// codes. Where GEMMs read none it is the composition of linear, silu and mul, which saves neither
// silu(gate) nor the product.
#include "dispatch/kernel_bridge.h"
#include "ops/autograd.h"
#include "ops/normed_input.h"
#include "ops/swiglu_mlp.h"

namespace qshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

bool is_given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

/// The format of a quantized tensor; of what is traced, which hides it, the one that was named.
const Format& format_of(const Tensor& weight, c10::string_view name) {
  if (has_key(weight)) return *buffer_of(weight).layout().format;
  return checked_format(name, "qshard::swiglu_mlp");
}

bool scales_by_itself(const Format& format) {
  return format.scales_in_grid() && format.amax_history.length == 0;
}

/// What is decided from sizes, device, dtype and formats: a traced call must decide as the real one
/// does.
struct SwigluUse {
  bool gives_codes = false;   // the gradients of gate and up reach their linears in codes
  bool keeps_maxima = false;  // of gate, up and their product, for backward

  SwigluUse(const Tensor& input, const Tensor& gate, const Tensor& down, bool weight_only,
            const Format& format, const Format& down_format) {
    if (weight_only || !input.is_cuda() || input.dim() == 0 || has_key(input)) return;
    for (const auto& size : {input.sym_numel(), gate.sym_size(0), down.sym_size(0)}) {
      if (!is_known(size)) return;
    }
    const int64_t k = input.size(-1);
    if (k == 0 || !scales_by_itself(format) || !scales_by_itself(down_format)) return;
    const int64_t m = leading_numel(input);
    const auto device = input.device();
    const auto runs_on_codes = [&](const Format& of, const Tensor& weight) {
      const int64_t rows = weight.size(0);
      const int64_t cols = weight.size(1);
      return multiplies_input_codes(of, device, input.scalar_type(), m, rows, cols) &&
             can_save_quantized_input(device, m, rows, cols);
    };
    if (!runs_on_codes(format, gate) || !runs_on_codes(down_format, down)) return;
    gives_codes = true;
    keeps_maxima = packed_scale_mode(down_format) == ScaleMode::kTensor;
  }
};

/// Of the tensors given to forward, those that there are count.
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

/// What gate and up make of the input, and what their gradients read of it.
struct FirstLinears {
  Tensor gate_values, up_values;
  Tensor gate_input, up_input;
  bool gate_saves_codes = true, up_saves_codes = true;
  std::optional<NormedInput> normed;  // instead of gate_input and up_input

  FirstLinears(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
               const OptionalTensor& gate_bias, const OptionalTensor& up_bias, bool weight_only,
               bool records_grad, c10::string_view format, WeightState gate_state,
               WeightState up_state) {
    static const auto quantize = typed_op<decltype(quantize_input_op)>("qshard::quantize_input");
    static const auto linear = typed_op<decltype(linear_forward_op)>("qshard::linear_forward");
    const InputUse of_gate(input, gate, weight_only, format);
    const InputUse of_up(input, is_given(up) ? *up : gate, weight_only, format);
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
    const bool needs_name = apart || gate_state.has_value();
    const auto run = [&](const Tensor& weight, const OptionalTensor& bias, const InputUse& of,
                         WeightState state) {
      auto [output, saved] =
          linear.call(input, weight, bias, of.saves_codes && !apart, weight_only, rows,
                      needs_name ? OptionalFormat(format) : std::nullopt, state, std::nullopt);
      return std::pair{output, !of.saves_codes ? input : apart ? columns : saved};
    };
    std::tie(gate_values, gate_input) = run(gate, gate_bias, of_gate, gate_state);
    if (is_given(up)) std::tie(up_values, up_input) = run(*up, up_bias, of_up, up_state);
    gate_saves_codes = of_gate.saves_codes;
    up_saves_codes = of_up.saves_codes;
  }

  /// Of norm(input), whose codes the weights read.
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
    const FirstLinears first =
        is_normed ? FirstLinears(input, {*norm_weight, norm_bias, eps, rms, zero_centered_gamma},
                                 gate, up, gate_bias, up_bias, gate_name)
                  : FirstLinears(input, gate, up, gate_bias, up_bias, weight_only, records_grad,
                                 gate_name, gate_state, up_state);
    const auto halves = is_joined ? first.gate_values.chunk(2, -1)
                                  : variable_list{first.gate_values, first.up_values};
    auto [output, maxima] =
        second.call(halves[0], halves[1], down, down_bias, use.keeps_maxima, weight_only,
                    needs_name ? OptionalFormat(down_name) : std::nullopt, down_state, residual);
    variable_list saved{gate,
                        down,
                        is_joined ? Tensor() : *up,
                        first.gate_input,
                        first.up_input,
                        first.gate_values,
                        first.up_values,
                        maxima};
    if (is_normed) {
      const auto kept = first.normed->save(ctx);
      saved.insert(saved.end(), kept.begin(), kept.end());
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["is_normed"] = is_normed;
    ctx->saved_data["adds_input"] = is_normed && is_given(residual) && residual->is_same(input);
    ctx->saved_data["gate_saves_codes"] = first.gate_saves_codes;
    ctx->saved_data["up_saves_codes"] = first.up_saves_codes;
    ctx->saved_data["weight_only"] = weight_only;
    ctx->saved_data["gives_codes"] = use.gives_codes;
    ctx->saved_data["grad_format"] = format.name;
    if (needs_name) {
      ctx->saved_data["gate_format"] = std::string(gate_name);
      ctx->saved_data["down_format"] = std::string(down_name);
    }
    // Plain weights are saved as they are, and quantized again in backward.
    if (gate_state) ctx->saved_data["gate_state"] = *gate_state;
    if (up_state) ctx->saved_data["up_state"] = *up_state;
    if (down_state) ctx->saved_data["down_state"] = *down_state;
    const auto note = [&](const char* name, const OptionalTensor& bias) {
      if (is_given(bias)) ctx->saved_data[name] = bias->scalar_type();
    };
    note("gate_bias", gate_bias);
    note("up_bias", up_bias);
    note("down_bias", down_bias);
    ctx->saved_data["has_residual"] = is_given(residual);
    return output;
  }

  static std::optional<std::string> name_in(AutogradContext* ctx, const char* key) {
    const auto found = ctx->saved_data.find(key);
    if (found == ctx->saved_data.end()) return std::nullopt;
    return found->second.toStringRef();
  }

  static std::optional<std::vector<Tensor>> state_in(AutogradContext* ctx, const char* key) {
    const auto found = ctx->saved_data.find(key);
    if (found == ctx->saved_data.end()) return std::nullopt;
    return found->second.toTensorVector();
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(kArguments);
    refuse_double_backward(grad, "qshard::swiglu_mlp");
    const auto saved = ctx->get_saved_variables();
    const Tensor& gate = saved[0];
    const Tensor& down = saved[1];
    const Tensor& up = saved[2];
    const Tensor& gate_values = saved[5];
    const bool is_joined = !up.defined();
    const auto has = [&](const char* name) { return ctx->saved_data.count(name) > 0; };
    const bool has_residual = ctx->saved_data["has_residual"].toBool();
    const Edges edge(!is_joined, has("gate_bias"), has("up_bias"), has("down_bias"), has_residual);
    const bool is_normed = ctx->saved_data["is_normed"].toBool();
    std::optional<NormedInput> normed;
    if (is_normed) normed = NormedInput::restore(ctx, &saved[8]);
    const bool needs_norm_weight = is_normed && ctx->needs_input_grad(edge.norm_weight);
    const bool needs_norm_bias =
        is_normed && normed->norm().has_bias() && ctx->needs_input_grad(edge.norm_bias);
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
    const auto gate_name = name_in(ctx, "gate_format");
    const auto down_name = name_in(ctx, "down_format");
    const auto down_state = state_in(ctx, "down_state");
    const std::string grad_format = ctx->saved_data["grad_format"].toStringRef();
    auto* node = evaluated_node<SwigluMlpFunction>(ctx);

    variable_list result(kArguments);
    // That of an input which is the residual, too, is added to the norm's as this is written.
    const bool adds_input = ctx->saved_data["adds_input"].toBool();
    if (has_residual && !adds_input && ctx->needs_input_grad(edge.residual)) {
      result[kResidual] = grad;
    }
    at::AutoDispatchBelowAutograd guard;
    const auto halves = is_joined ? gate_values.chunk(2, -1) : variable_list{gate_values, saved[6]};
    std::array<Tensor, 4> inner;  // of gate and of up: values, or codes and columns of codes
    {
      const WeightGrad into(needs_down ? node : nullptr, edge.down, down, grad, gate_values);
      const bool needs_weights = needs_gate || needs_up || needs_bias;
      const auto format = gives_codes ? OptionalFormat(grad_format) : std::nullopt;
      if (into.leaf.sum.defined()) {
        static const auto op = typed_op<decltype(swiglu_linear_backward_accumulate)>(
            "qshard::swiglu_linear_backward_accumulate");
        std::tie(inner[0], inner[1], inner[2], inner[3]) = op.call(
            grad, halves[0], halves[1], down, saved[7], into.leaf.sum, needs_input, needs_weights,
            is_joined, format, weight_only, OptionalFormat(down_name), down_state);
      } else {
        static const auto op =
            typed_op<decltype(swiglu_linear_backward)>("qshard::swiglu_linear_backward");
        Tensor grad_down;
        std::tie(grad_down, inner[0], inner[1], inner[2], inner[3]) = op.call(
            grad, halves[0], halves[1], down, saved[7], needs_down, needs_input, needs_weights,
            is_joined, format, weight_only, into.dtype, OptionalFormat(down_name), down_state);
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
    const auto input_of = [&](const Tensor& saved) -> const Tensor& {
      return !is_normed ? saved : columns.defined() ? columns : normed->input();
    };
    const auto first = [&](const Tensor& weight, const Tensor& input, bool is_quantized,
                           bool needs_weight, size_t weight_edge, size_t matrix, WeightState state,
                           Tensor& grad_weight, const OptionalTensor& input_sum) {
      const Tensor& rows = inner[2 * matrix];
      const Tensor& columns = inner[2 * matrix + 1];
      const WeightGrad into(needs_weight ? node : nullptr, weight_edge, weight, rows, input);
      const Tensor& sum = into.leaf.sum;
      const auto dtype = gate_values.scalar_type();
      const auto size = gate_values.sizes();
      const OptionalFormat name(gate_name);
      if (gives_codes && sum.defined()) {
        static const auto op = typed_op<decltype(linear_backward_codes_accumulate)>(
            "qshard::linear_backward_codes_accumulate");
        return op.call(rows, columns, size, dtype, weight, input, is_quantized, needs_input, sum,
                       name, state, input_sum);
      }
      if (!needs_input && !needs_weight) return Tensor();
      Tensor grad_input, made;
      if (gives_codes) {
        static const auto op =
            typed_op<decltype(linear_backward_codes)>("qshard::linear_backward_codes");
        std::tie(grad_input, made) =
            op.call(rows, columns, size, dtype, weight, input, is_quantized, needs_input,
                    needs_weight, into.dtype, name, state, input_sum);
      } else {
        std::tie(grad_input, made) =
            linear_gradients(into, rows, weight, input, is_quantized, needs_input, needs_weight,
                             weight_only, state ? name : std::nullopt, state);
      }
      if (needs_weight) grad_weight = made;
      return grad_input;
    };
    Tensor grad_input =
        first(gate, input_of(saved[3]), ctx->saved_data["gate_saves_codes"].toBool(), needs_gate,
              edge.gate, 0, state_in(ctx, "gate_state"), result[kGate], std::nullopt);
    if (!is_joined) {
      // Nobody else has it yet.
      const bool is_added = needs_input && gives_codes && !is_traced_or_subclass(grad_input);
      const Tensor other = first(up, input_of(saved[4]), ctx->saved_data["up_saves_codes"].toBool(),
                                 needs_up, edge.up, 1, state_in(ctx, "up_state"), result[kUp],
                                 is_added ? OptionalTensor(grad_input) : std::nullopt);
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
};

void check_swiglu_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                      const Tensor& down, const OptionalTensor& gate_bias,
                      const OptionalTensor& up_bias, const OptionalTensor& down_bias) {
  const bool joined = !is_given(up);
  const auto is_bias_of = [](const OptionalTensor& bias, const Tensor& weight) {
    return !is_given(bias) || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0));
  };
  const bool fits =
      input.dim() >= 1 && gate.dim() == 2 && down.dim() == 2 &&
      (joined || (up->dim() == 2 && up->sym_sizes() == gate.sym_sizes())) &&
      input.sym_size(-1) == gate.sym_size(1) &&
      gate.sym_size(0) == down.sym_size(1) * (joined ? 2 : 1) && is_bias_of(gate_bias, gate) &&
      (joined ? !is_given(up_bias) : is_bias_of(up_bias, *up)) && is_bias_of(down_bias, down);
  TORCH_CHECK(fits, "qshard::swiglu_mlp: input ", input.sym_sizes(), ", gate ", gate.sym_sizes(),
              ", up ", joined ? std::string("none") : c10::str(up->sym_sizes()), " and down ",
              down.sym_sizes(),
              " do not go together: gate and up are (inner, columns), or gate alone is "
              "(2 inner, columns), down is (outputs, inner), and biases have their rows");
}

void check_norm(const Tensor& input, const OptionalTensor& norm_weight,
                const OptionalTensor& norm_bias, bool rms) {
  if (!is_given(norm_weight) && !is_given(norm_bias)) return;
  const bool fits =
      is_given(norm_weight) && NormArguments{*norm_weight, norm_bias, 0., rms, false}.fits(input);
  TORCH_CHECK(fits, "qshard::swiglu_mlp: norm_weight and norm_bias are (", input.sym_size(-1),
              ",), norm_bias only beside norm_weight and not of an RMSNorm");
}

/// Whether weights are plain ones that are quantized for each use.
bool are_dynamic(const OptionalTensor& up, WeightState gate_state, WeightState up_state,
                 WeightState down_state) {
  const bool is_dynamic = gate_state.has_value();
  TORCH_CHECK_VALUE(
      down_state.has_value() == is_dynamic && up_state.has_value() == (is_dynamic && is_given(up)),
      "qshard::swiglu_mlp: gate_state, up_state and down_state are given for all weights or for "
      "none");
  return is_dynamic;
}

/// Whether gate and up multiply codes that are made of the input as it is normalized.
bool reads_normed_codes(const Tensor& input, const OptionalTensor& norm_weight,
                        const OptionalTensor& norm_bias, const Tensor& gate,
                        const OptionalTensor& up, const OptionalTensor& gate_bias,
                        const OptionalTensor& up_bias, bool weight_only, bool is_dynamic,
                        c10::string_view format) {
  if (!is_given(norm_weight) || weight_only || is_dynamic) return false;
  if (is_given(up) && is_given(gate_bias) != is_given(up_bias)) return false;
  std::vector<Tensor> weights{gate};
  if (is_given(up)) weights.push_back(*up);
  return norm_linear_reads_codes(input, *norm_weight, norm_bias, weights, format);
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
  const auto if_in_codes = [&](const OptionalTensor& tensor) {
    return in_codes ? tensor : std::nullopt;
  };
  return SwigluMlpFunction::apply(
      x, first, quantized(down, down_format), second, gate_bias, up_bias, down_bias, residual,
      if_in_codes(norm_weight), if_in_codes(norm_bias), eps, rms, zero_centered_gamma, weight_only,
      at::GradMode::is_enabled(), format, down_format, gate_state, up_state, down_state);
}

}  // namespace qshard
