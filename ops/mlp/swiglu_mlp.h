// An MLP of SwiGLU on quantized weights: down(silu(gate(x)) * up(x)), and the operators that it is
// made of. What lies between the linears is remade in backward, and quantized as it is made. So for
// other activations: down(f(gate(x)) * up(x)), and down(f(gate(x))), which has no up.
#pragma once

#include "ops/calls/ops.h"

namespace qshard {

using OptionalFormat = std::optional<c10::string_view>;

constexpr c10::string_view kSwiglu = "swiglu";

/// ops/mlp/swiglu_mlp_autograd.cpp. `up` null: `gate` has the rows of both, those of gate first.
/// `residual`: added to the output. activation: a name of mlp_activation(). norm_weight: the input
/// is normalized first (ops/linear/normed_input.h).
Tensor swiglu_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                  const Tensor& down, const OptionalTensor& gate_bias,
                  const OptionalTensor& up_bias, const OptionalTensor& down_bias, bool weight_only,
                  c10::string_view format, c10::string_view down_format,
                  const WeightState& gate_state, const WeightState& up_state,
                  const WeightState& down_state, const OptionalTensor& residual,
                  const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps,
                  bool rms, bool zero_centered_gamma, c10::string_view activation);
Tensor swiglu_mlp_autograd(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const Tensor& down, const OptionalTensor& gate_bias,
                           const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                           bool weight_only, c10::string_view format, c10::string_view down_format,
                           const WeightState& gate_state, const WeightState& up_state,
                           const WeightState& down_state, const OptionalTensor& residual,
                           const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                           double eps, bool rms, bool zero_centered_gamma,
                           c10::string_view activation);

/// The MLPs of experts (ops/mlp/swiglu_experts.cpp): input (T, columns), gate, up (experts, inner,
/// columns), down (experts, outputs, inner), and `offs` as of grouped_linear.
Tensor swiglu_experts(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                      const Tensor& down, const Tensor& offs, bool weight_only,
                      OptionalFormat format, OptionalFormat down_format);
/// ops/mlp/swiglu_mlp_autograd.cpp
Tensor swiglu_experts_autograd(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                               const Tensor& down, const Tensor& offs, bool weight_only,
                               OptionalFormat format, OptionalFormat down_format);
Tensor swiglu_experts_meta(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const Tensor& down, const Tensor& offs, bool weight_only,
                           OptionalFormat format, OptionalFormat down_format);
/// @throws c10::Error for shapes that do not go together.
void check_swiglu_experts(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                          const Tensor& down, const Tensor& offs);

/// ops/mlp/swiglu_mlp.cpp. `format`: checked against the weight's; of a plain weight that is
/// quantized for this use, with `weight_state`. `offs`: the weight is a stack of experts'.
std::tuple<Tensor, Tensor> swiglu_linear_forward(
    const Tensor& gate, const OptionalTensor& up, const Tensor& weight, const OptionalTensor& bias,
    bool keep_maxima, bool weight_only, OptionalFormat format, const WeightState& weight_state,
    const OptionalTensor& residual = {}, const OptionalTensor& offs = {},
    c10::string_view activation = kSwiglu);
/// (grad_weight, gate, gate_columns, up, up_columns): of the gradients of gate and up the codes for
/// linears whose weights have `grad_format`, or without one the values. (0,) what is not asked for;
/// where they are joined, all of it is gate's. weight_grad: as of linear_backward. bias_grads: left
/// with the sums of both gradients over rows.
using SwigluLinearGrads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
SwigluLinearGrads swiglu_linear_backward(
    const Tensor& grad, const Tensor& gate, const OptionalTensor& up, const Tensor& weight,
    const Tensor& maxima, bool needs_weight, bool rows, bool columns, bool joined,
    OptionalFormat grad_format, bool weight_only, std::optional<at::ScalarType> grad_dtype,
    OptionalFormat format, const WeightState& weight_state, const OptionalTensor& weight_grad,
    const OptionalTensor& offs = {}, c10::string_view activation = kSwiglu,
    const OptionalTensor& bias_grads = {});
/// Another name of it, which calls it by the dispatcher.
std::tuple<Tensor, Tensor, Tensor, Tensor> swiglu_linear_backward_accumulate(
    const Tensor& grad, const Tensor& gate, const OptionalTensor& up, const Tensor& weight,
    const Tensor& maxima, const Tensor& weight_grad, bool rows, bool columns, bool joined,
    OptionalFormat grad_format, bool weight_only, OptionalFormat format,
    const WeightState& weight_state, c10::string_view activation);

/// ops/mlp/swiglu_mlp_meta.cpp
Tensor swiglu_mlp_meta(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                       const Tensor& down, const OptionalTensor& gate_bias,
                       const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                       bool weight_only, c10::string_view format, c10::string_view down_format,
                       const WeightState& gate_state, const WeightState& up_state,
                       const WeightState& down_state, const OptionalTensor& residual,
                       const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                       double eps, bool rms, bool zero_centered_gamma, c10::string_view activation);
std::tuple<Tensor, Tensor> swiglu_linear_forward_meta(
    const Tensor& gate, const OptionalTensor& up, const Tensor& weight, const OptionalTensor& bias,
    bool keep_maxima, bool weight_only, OptionalFormat format, const WeightState& weight_state,
    const OptionalTensor& residual, const OptionalTensor& offs, c10::string_view activation);
SwigluLinearGrads swiglu_linear_backward_meta(
    const Tensor& grad, const Tensor& gate, const OptionalTensor& up, const Tensor& weight,
    const Tensor& maxima, bool needs_weight, bool rows, bool columns, bool joined,
    OptionalFormat grad_format, bool weight_only, std::optional<at::ScalarType> grad_dtype,
    OptionalFormat format, const WeightState& weight_state, const OptionalTensor& weight_grad,
    const OptionalTensor& offs, c10::string_view activation, const OptionalTensor& bias_grads);

}  // namespace qshard
