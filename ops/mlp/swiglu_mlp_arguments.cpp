#include "ops/mlp/swiglu_mlp_arguments.h"

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/shown_name.h"
#include "kernels/linear/linear.h"
#include "ops/linear/autograd.h"
#include "ops/linear/normed_input.h"

namespace qshard {

const Format& format_of(const Tensor& weight, c10::string_view name) {
  if (has_key(weight)) return *buffer_of(weight).layout().format;
  return checked_format(name, "qshard::swiglu_mlp");
}

MlpActivation mlp_activation(const char* op, c10::string_view name) {
  constexpr std::pair<c10::string_view, MlpActivation> kKnown[] = {
      {kSwiglu, {Activation::kSilu, true}}, {"geglu", {Activation::kGelu, true}},
      {"reglu", {Activation::kRelu, true}}, {"sreglu", {Activation::kSquaredRelu, true}},
      {"silu", {Activation::kSilu, false}}, {"gelu", {Activation::kGelu, false}},
      {"relu", {Activation::kRelu, false}}, {"srelu", {Activation::kSquaredRelu, false}},
  };
  for (const auto& [known, activation] : kKnown) {
    if (name == known) return activation;
  }
  TORCH_CHECK_VALUE(false, op, ": unknown activation '", shown_name(name),
                    "'; known are swiglu, geglu, reglu, sreglu, silu, gelu, relu and srelu");
}

SwigluUse::SwigluUse(const Tensor& input, const Tensor& gate, const Tensor& down, bool weight_only,
                     const Format& format, const Format& down_format) {
  if (weight_only || !input.is_cuda() || input.dim() == 0 || has_key(input)) return;
  for (const auto& size : {input.sym_numel(), gate.sym_size(0), down.sym_size(0)}) {
    if (!is_known(size)) return;
  }
  const int64_t k = input.size(-1);
  if (k == 0 || !gives_gradients_in_codes(format) || !scales_by_itself(down_format)) return;
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

GateAndUp::GateAndUp(const Tensor& gate, const Tensor& up, bool is_joined) : gate(gate) {
  if (is_joined) {
    const auto halves = gate.chunk(2, -1);
    this->gate = halves[0];
    this->up = halves[1];
  } else if (up.defined()) {
    this->up = up;
  }
}

MlpActivation check_swiglu_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                               const Tensor& down, const OptionalTensor& gate_bias,
                               const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                               c10::string_view activation) {
  const MlpActivation known = mlp_activation("qshard::swiglu_mlp", activation);
  const bool gated = known.gated;
  TORCH_CHECK(gated || !is_given(up), "qshard::swiglu_mlp: ", activation,
              " multiplies by nothing; give gate alone, up as None");
  const bool joined = gated && !is_given(up);
  const auto is_bias_of = [](const OptionalTensor& bias, const Tensor& weight) {
    return !is_given(bias) || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0));
  };
  const bool fits =
      input.dim() >= 1 && gate.dim() == 2 && down.dim() == 2 &&
      (!is_given(up) || (up->dim() == 2 && up->sym_sizes() == gate.sym_sizes())) &&
      input.sym_size(-1) == gate.sym_size(1) &&
      gate.sym_size(0) == down.sym_size(1) * (joined ? 2 : 1) && is_bias_of(gate_bias, gate) &&
      (is_given(up) ? is_bias_of(up_bias, *up) : !is_given(up_bias)) && is_bias_of(down_bias, down);
  TORCH_CHECK(fits, "qshard::swiglu_mlp: input ", input.sym_sizes(), ", gate ", gate.sym_sizes(),
              ", up ", is_given(up) ? c10::str(up->sym_sizes()) : std::string("none"), " and down ",
              down.sym_sizes(), " do not go together: ",
              gated ? "gate and up are (inner, columns), or gate alone is (2 inner, columns)"
                    : "gate is (inner, columns)",
              ", down is (outputs, inner), and biases have their rows");
  return known;
}

void check_norm(const Tensor& input, const OptionalTensor& norm_weight,
                const OptionalTensor& norm_bias, bool rms) {
  if (!is_given(norm_weight) && !is_given(norm_bias)) return;
  const bool fits =
      is_given(norm_weight) && NormArguments{*norm_weight, norm_bias, 0., rms, false}.fits(input);
  TORCH_CHECK(fits, "qshard::swiglu_mlp: norm_weight and norm_bias are (", input.sym_size(-1),
              ",), norm_bias only beside norm_weight and not of an RMSNorm");
}

bool are_dynamic(const OptionalTensor& up, const WeightState& gate_state,
                 const WeightState& up_state, const WeightState& down_state) {
  const bool is_dynamic = gate_state.has_value();
  TORCH_CHECK_VALUE(
      down_state.has_value() == is_dynamic && up_state.has_value() == (is_dynamic && is_given(up)),
      "qshard::swiglu_mlp: gate_state, up_state and down_state are given for all weights or for "
      "none");
  return is_dynamic;
}

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

}  // namespace qshard
