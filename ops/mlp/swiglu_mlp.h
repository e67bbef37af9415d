// An MLP of SwiGLU on quantized weights: down(silu(gate(x)) * up(x)), and the operators that it is
// made of. What lies between the linears is remade in backward, and quantized as it is made.
#pragma once

#include "ops/calls/ops.h"

namespace qshard {

using OptionalFormat = std::optional<c10::string_view>;

/// ops/mlp/swiglu_mlp_autograd.cpp. `up` null: `gate` has the rows of both, those of gate first.
/// `residual`: added to the output. norm_weight: the input is normalized first
/// (ops/linear/normed_input.h).
Tensor swiglu_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                  const Tensor& down, const OptionalTensor& gate_bias,
                  const OptionalTensor& up_bias, const OptionalTensor& down_bias, bool weight_only,
                  c10::string_view format, c10::string_view down_format, WeightState gate_state,
                  WeightState up_state, WeightState down_state, const OptionalTensor& residual,
                  const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps,
                  bool rms, bool zero_centered_gamma);
Tensor swiglu_mlp_autograd(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const Tensor& down, const OptionalTensor& gate_bias,
                           const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                           bool weight_only, c10::string_view format, c10::string_view down_format,
                           WeightState gate_state, WeightState up_state, WeightState down_state,
                           const OptionalTensor& residual, const OptionalTensor& norm_weight,
                           const OptionalTensor& norm_bias, double eps, bool rms,
                           bool zero_centered_gamma);

/// ops/mlp/swiglu_mlp.cpp. `format`: checked against the weight's; of a plain weight that is
/// quantized for this use, with `weight_state`.
std::tuple<Tensor, Tensor> swiglu_linear_forward(const Tensor& gate, const Tensor& up,
                                                 const Tensor& weight, const OptionalTensor& bias,
                                                 bool keep_maxima, bool weight_only,
                                                 OptionalFormat format, WeightState weight_state,
                                                 const OptionalTensor& residual = {});
/// (grad_weight, gate, gate_columns, up, up_columns): of the gradients of gate and up the codes for
/// linears whose weights have `grad_format`, or without one the values. (0,) what is not asked for;
/// where they are joined, all of it is gate's.
using SwigluLinearGrads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
SwigluLinearGrads swiglu_linear_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                         const Tensor& weight, const Tensor& maxima,
                                         bool needs_weight, bool rows, bool columns, bool joined,
                                         OptionalFormat grad_format, bool weight_only,
                                         std::optional<at::ScalarType> grad_dtype,
                                         OptionalFormat format, WeightState weight_state);
/// `input_sum`: grad_input is added to it, and (0,) as a result.
std::tuple<Tensor, Tensor> linear_backward_codes(
    const Tensor& rows, const Tensor& columns, at::IntArrayRef size, at::ScalarType dtype,
    const Tensor& weight, const Tensor& input, bool input_is_quantized, bool needs_input,
    bool needs_weight, std::optional<at::ScalarType> grad_dtype, OptionalFormat format,
    WeightState weight_state, const OptionalTensor& input_sum);
/// The same with the weight's gradient added to `weight_grad`.
std::tuple<Tensor, Tensor, Tensor, Tensor> swiglu_linear_backward_accumulate(
    const Tensor& grad, const Tensor& gate, const Tensor& up, const Tensor& weight,
    const Tensor& maxima, const Tensor& weight_grad, bool rows, bool columns, bool joined,
    OptionalFormat grad_format, bool weight_only, OptionalFormat format, WeightState weight_state);
Tensor linear_backward_codes_accumulate(const Tensor& rows, const Tensor& columns,
                                        at::IntArrayRef size, at::ScalarType dtype,
                                        const Tensor& weight, const Tensor& input,
                                        bool input_is_quantized, bool needs_input,
                                        const Tensor& weight_grad, OptionalFormat format,
                                        WeightState weight_state, const OptionalTensor& input_sum);

/// ops/mlp/swiglu_mlp_meta.cpp
Tensor swiglu_mlp_meta(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                       const Tensor& down, const OptionalTensor& gate_bias,
                       const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                       bool weight_only, c10::string_view format, c10::string_view down_format,
                       WeightState gate_state, WeightState up_state, WeightState down_state,
                       const OptionalTensor& residual, const OptionalTensor& norm_weight,
                       const OptionalTensor& norm_bias, double eps, bool rms,
                       bool zero_centered_gamma);
std::tuple<Tensor, Tensor> swiglu_linear_forward_meta(const Tensor& gate, const Tensor& up,
                                                      const Tensor& weight,
                                                      const OptionalTensor& bias, bool keep_maxima,
                                                      bool weight_only, OptionalFormat format,
                                                      WeightState weight_state,
                                                      const OptionalTensor& residual);
SwigluLinearGrads swiglu_linear_backward_meta(const Tensor& grad, const Tensor& gate,
                                              const Tensor& up, const Tensor& weight,
                                              const Tensor& maxima, bool needs_weight, bool rows,
                                              bool columns, bool joined, OptionalFormat grad_format,
                                              bool weight_only,
                                              std::optional<at::ScalarType> grad_dtype,
                                              OptionalFormat format, WeightState weight_state);
std::tuple<Tensor, Tensor> linear_backward_codes_meta(
    const Tensor& rows, const Tensor& columns, at::IntArrayRef size, at::ScalarType dtype,
    const Tensor& weight, const Tensor& input, bool input_is_quantized, bool needs_input,
    bool needs_weight, std::optional<at::ScalarType> grad_dtype, OptionalFormat format,
    WeightState weight_state, const OptionalTensor& input_sum);
std::tuple<Tensor, Tensor, Tensor, Tensor> swiglu_linear_backward_accumulate_meta(
    const Tensor& grad, const Tensor& gate, const Tensor& up, const Tensor& weight,
    const Tensor& maxima, const Tensor& weight_grad, bool rows, bool columns, bool joined,
    OptionalFormat grad_format, bool weight_only, OptionalFormat format, WeightState weight_state);
Tensor linear_backward_codes_accumulate_meta(const Tensor& rows, const Tensor& columns,
                                             at::IntArrayRef size, at::ScalarType dtype,
                                             const Tensor& weight, const Tensor& input,
                                             bool input_is_quantized, bool needs_input,
                                             const Tensor& weight_grad, OptionalFormat format,
                                             WeightState weight_state,
                                             const OptionalTensor& input_sum);

}  // namespace qshard
