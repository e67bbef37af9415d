#include "ops/mlp/swiglu_mlp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "dispatch/aten/matmul.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/device/capture.h"
#include "kernels/grouped/grouped_mlp.h"
#include "kernels/linear/swiglu_operand.h"
#include "ops/linear/autograd.h"
#include "ops/linear/grouped_linear.h"
#include "ops/linear/linear_operands.h"
#include "ops/mlp/swiglu_mlp_arguments.h"

namespace qshard {
namespace {

/// Returns what `activation` is, by which `up` is given or not.
MlpActivation check_swiglu(const char* op, const Tensor& gate, const OptionalTensor& up,
                           const Tensor& weight, c10::string_view activation) {
  const MlpActivation known = mlp_activation(op, activation);
  TORCH_CHECK(known.gated == is_given(up),
              fmt::format("{}: {} {}", op, activation,
                          known.gated ? "multiplies by up, which is not given"
                                      : "multiplies by nothing; give gate alone, up as None"));
  const auto fits = [&](const Tensor& values) {
    return values.dim() >= 1 && values.sizes() == gate.sizes() &&
           values.size(-1) == weight.size(-1) && values.scalar_type() == gate.scalar_type() &&
           is_value_dtype(values.scalar_type()) && values.device() == weight.device();
  };
  const auto described = [](const Tensor& values) {
    return fmt::format("{} of shape {} on {}", c10::toString(values.scalar_type()),
                       values.sizes().vec(), values.device().str());
  };
  TORCH_CHECK(fits(gate) && (!known.gated || fits(*up)),
              fmt::format("{}: gate and up must be float32, bfloat16 or float16 tensors (..., {}) "
                          "on {}, got {} and {}",
                          op, weight.size(-1), weight.device().str(), described(gate),
                          known.gated ? described(*up) : "none"));
  return known;
}

void check_experts_activation(const char* op, c10::string_view activation) {
  TORCH_CHECK(activation == kSwiglu, op, ": offs go with the activation swiglu alone");
}

LinearWeight checked_weight(const Tensor& weight, OptionalFormat format, const WeightState& state,
                            WeightUse use, const char* op) {
  LinearWeight used = weight_for_use(weight, format, state, use, op);
  check_expected_format(used, format);
  return used;
}

/// As a matrix; undefined without it.
Tensor matrix_of(const OptionalTensor& up) { return is_given(up) ? as_matrix(*up) : Tensor(); }

/// gate and up as matrices, and what forward knew of silu(gate) * up.
struct SavedSwiglu {
  Tensor gate, up;
  Tensor maxima;  // undefined if they are not known
  Activation activation;

  SavedSwiglu(const char* op, const Tensor& gate, const OptionalTensor& up, const Tensor& maxima,
              Activation activation)
      : gate(as_matrix(gate)), up(matrix_of(up)), activation(activation) {
    if (maxima.numel() == 0) return;
    const int64_t numel = swiglu_maxima_numel(this->gate.size(0), this->gate.size(1));
    TORCH_CHECK(
        maxima.dim() == 1 && maxima.numel() == numel && maxima.is_contiguous() &&
            maxima.scalar_type() == at::kFloat && maxima.device() == gate.device() &&
            !has_key(maxima),
        fmt::format("{}: maxima must be ({},) float32 on {}, as forward kept them for gate "
                    "of shape {}, or (0,), got {} of {} on {}",
                    op, numel, gate.device().str(), gate.sizes().vec(), maxima.sizes().vec(),
                    c10::toString(maxima.scalar_type()), maxima.device().str()));
    this->maxima = maxima;
  }
  SwigluOperand product() const { return {gate, up, maxima, activation}; }
  std::pair<Tensor, Tensor> gradients(const Tensor& grad) const {
    return swiglu_gradients(grad, gate, up, activation);
  }
};

/// Which gradients of gate and up an operator is asked for.
struct InnerGradients {
  bool rows = false;
  bool columns = false;
  bool joined = false;
  const Format* format = nullptr;  // of the weights that their codes meet; null: values
  Tensor column_sums = {};         // to leave the gradients of biases in, or undefined

  bool any() const { return rows || columns; }
};

// Their values, in the shape of `gate`.
void set_values(SwigluLinearGrads& out, const Tensor& grad, const SavedSwiglu& saved,
                const InnerGradients& inner, const Tensor& gate) {
  auto [grad_gate, grad_up] = saved.gradients(grad);
  if (inner.column_sums.defined()) sum_columns(grad_gate, grad_up, inner.column_sums);
  auto sizes = gate.sizes().vec();
  if (inner.joined) {
    sizes.back() *= 2;
    std::get<1>(out) = at::cat({grad_gate, grad_up}, 1).view(sizes);
  } else {
    std::get<1>(out) = grad_gate.reshape(sizes).contiguous();
    if (grad_up.defined()) std::get<3>(out) = grad_up.reshape(sizes).contiguous();
  }
}

/// The linears of gate and up are given the codes of their gradients alone: what was lost is
/// counted here. `grad` is that of silu(gate) * up.
void keep_tallies(const SwigluBackward& made, const Tensor& grad, const SavedSwiglu& saved,
                  bool joined) {
  if (is_capturing(grad.device())) return;
  auto [grad_gate, grad_up] = saved.gradients(grad);
  if (joined) grad_gate = at::cat({grad_gate, grad_up}, 1);
  const auto keep = [](const QuantizedMatrix& codes, const Tensor& values) {
    keep_tally(bytes_of(codes.rowwise), coded_matrix(codes, values.contiguous()));
  };
  keep(made.gate, grad_gate);
  if (!joined && grad_up.defined()) keep(made.up, grad_up);
}

SwigluLinearGrads swiglu_backward_of(const char* op, const Tensor& grad, const Tensor& gate,
                                     const OptionalTensor& up, const LinearWeight& weight,
                                     const Tensor& maxima, const WgradRequest& wgrad,
                                     const InnerGradients& inner, bool weight_only,
                                     MlpActivation activation) {
  const QuantizedMatrix& codes = weight.codes;
  TORCH_CHECK(grad.dim() == gate.dim() && grad.size(-1) == codes.rows &&
                  leading_numel(grad) == leading_numel(gate),
              fmt::format("{}: a gradient of shape {} does not fit gate of shape {} and a weight "
                          "of ({}, {})",
                          op, grad.sizes().vec(), gate.sizes().vec(), codes.rows, codes.cols));
  TORCH_CHECK(activation.gated || !inner.joined, op,
              ": a gradient is joined of those of gate and up, and there is no up");
  const SavedSwiglu saved(op, gate, up, maxima, activation.function);
  const Format& own = *codes.format;
  const ValuesOrCodes given = given_or_values(grad, own, op);
  CachedOperand gradient(producer_of(given),
                         {.rowwise = inner.any(), .columnwise = wgrad.is_needed});
  const SwigluOperand product = saved.product();
  std::optional<QuantizedOperand> product_codes;
  const auto none = [&] { return none_of(gate.options().dtype(at::kByte)); };
  SwigluLinearGrads out{Tensor(), none(), none(), none(), none()};
  if (inner.any()) {
    const Tensor grad_product =
        linear_backward({.grad = &gradient, .needs_input = true, .weight_only = weight_only},
                        weight)
            .grad_input;
    gradient.release_rows();  // before what takes more memory than anything else in an MLP
    if (inner.format == nullptr) {
      set_values(out, grad_product, saved, inner, gate);
    } else {
      SwigluBackwardRequest request{
          .gradients = {.format = inner.format,
                        .role = OperandRole::kGradient,
                        .orientations = {.rowwise = inner.rows, .columnwise = inner.columns}},
          .joined = inner.joined,
          .activation = saved.activation,
          .maxima = saved.maxima,
          .column_sums = inner.column_sums};
      if (wgrad.is_needed && !weight_only && scales_by_itself(own) &&
          can_save_quantized_input(gate.device(), saved.gate.size(0), codes.rows, codes.cols)) {
        request.input = &own;
      }
      auto made = swiglu_backward(grad_product, saved.gate, saved.up, request);
      if (inner.rows && weight.watched && weight.watched->is_sampled()) {
        keep_tallies(made, grad_product, saved, inner.joined);
      }
      std::get<1>(out) = bytes_or_none(made.gate.rowwise, gate);
      std::get<2>(out) = bytes_or_none(made.gate.columnwise, gate);
      std::get<3>(out) = bytes_or_none(made.up.rowwise, gate);
      std::get<4>(out) = bytes_or_none(made.up.columnwise, gate);
      if (request.input != nullptr) product_codes.emplace(std::move(made.input), gate.options());
    }
  }
  LinearBackward result;
  if (wgrad.is_needed) {
    const OperandProducer* input = &product;
    if (product_codes) input = &*product_codes;
    result = linear_backward({.grad = &gradient,
                              .input = input,
                              .weight_grad_dtype = wgrad.dtype,
                              .sum = wgrad.sum,
                              .weight_only = weight_only},
                             weight);
  }
  std::get<0>(out) = wgrad.result(result, grad.options());
  return out;
}

/// The same of experts whose gradients pass in codes.
SwigluLinearGrads swiglu_codes_of_experts(const char* op, const Tensor& grad, const Tensor& gate,
                                          const Tensor& up, const Tensor& weight,
                                          const Tensor& offs, const WgradRequest& wgrad,
                                          const InnerGradients& inner, OptionalFormat format,
                                          const WeightState& state) {
  check_groups(grad, weight.transpose(-1, -2), offs, op);
  const ExpertWeights down = experts_for_use(weight, format, state, backward_use(true), op);
  const GroupedMlpBackward made = grouped_mlp_backward(
      {.grad = given_operand(grad, *down.stack.codes.format, op),
       .gate = gate,
       .up = up,
       .inner = {.gradients = inner.format,
                 .orientations = {.rowwise = inner.rows, .columnwise = inner.columns},
                 .joined = inner.joined},
       .needs_weight = wgrad.is_needed,
       .weight_grad_dtype = wgrad.dtype,
       .sum = wgrad.sum},
      down, {offs.contiguous()});
  const auto bytes = [&](const Tensor& saved) {
    return saved.defined() ? saved : none_of(gate.options().dtype(at::kByte));
  };
  LinearBackward result;
  result.grad_weight = made.grad_weight;
  return {wgrad.result(result, grad.options()), bytes(made.gate.saved_rows), bytes(made.gate.saved),
          bytes(made.up.saved_rows), bytes(made.up.saved)};
}

/// The same of experts, whose gradients pass in values.
SwigluLinearGrads swiglu_backward_of_experts(const char* op, const Tensor& grad, const Tensor& gate,
                                             const Tensor& up, const Tensor& weight,
                                             const Tensor& product_codes, const Tensor& offs,
                                             const WgradRequest& wgrad, const InnerGradients& inner,
                                             bool weight_only, OptionalFormat format,
                                             const WeightState& state) {
  if (inner.format != nullptr && inner.any()) {
    return swiglu_codes_of_experts(op, grad, gate, up, weight, offs, wgrad, inner, format, state);
  }
  const SavedSwiglu saved(op, gate, up, none_of(gate.options().dtype(at::kFloat)),
                          Activation::kSilu);
  const bool has_codes = wgrad.is_needed && product_codes.numel() > 0;
  const Tensor hidden = has_codes         ? product_codes
                        : wgrad.is_needed ? saved.product().values(gate.scalar_type())
                                          : saved.gate;
  const LinearBackward made =
      grouped_linear_backward({grad, weight, hidden, has_codes, offs, inner.any(), weight_only,
                               format, state, /*input_sum=*/std::nullopt},
                              wgrad.is_needed, wgrad.sum, wgrad.dtype);
  const auto none = [&] { return none_of(gate.options().dtype(at::kByte)); };
  SwigluLinearGrads out{wgrad.result(made, grad.options()), none(), none(), none(), none()};
  if (inner.any()) set_values(out, made.grad_input, saved, inner, gate);
  return out;
}

InnerGradients inner_gradients(const char* op, bool rows, bool columns, bool joined,
                               OptionalFormat format) {
  return {rows, columns, joined, format ? &checked_format(*format, op) : nullptr};
}

/// The memory for the sums of the gradients of gate and up, or undefined.
Tensor checked_bias_grads(const char* op, const OptionalTensor& sums, const InnerGradients& inner,
                          const Tensor& gate, const OptionalTensor& up) {
  if (!is_given(sums)) return {};
  const int64_t numel = gate.size(-1) * (is_given(up) ? 2 : 1);
  TORCH_CHECK(inner.any() && sums->dim() == 1 && sums->numel() == numel && sums->is_contiguous() &&
                  sums->scalar_type() == at::kFloat && sums->device() == gate.device() &&
                  !has_key(*sums),
              fmt::format("{}: bias_grads must be contiguous float32 ({},) on {}, beside rows or "
                          "columns, got {} {} on {}",
                          op, numel, gate.device().str(), c10::toString(sums->scalar_type()),
                          sums->sizes().vec(), sums->device().str()));
  return *sums;
}

}  // namespace

std::tuple<Tensor, Tensor> swiglu_linear_forward(
    const Tensor& gate, const OptionalTensor& up, const Tensor& weight, const OptionalTensor& bias,
    bool keep_maxima, bool weight_only, OptionalFormat format, const WeightState& weight_state,
    const OptionalTensor& residual, const OptionalTensor& offs, c10::string_view activation) {
  PlainGuard guard;
  const char* op = "qshard::swiglu_linear_forward";
  c10::OptionalDeviceGuard device_guard(weight.device());
  if (is_given(offs)) {
    TORCH_CHECK(!is_given(bias) && !is_given(residual) && !weight_state, op,
                ": offs go with no bias, residual or weight_state");
    check_experts_activation(op, activation);
    check_swiglu(op, gate, up, weight, activation);
    check_groups(gate, weight, *offs, op);
    const ExpertWeights down =
        experts_for_use(weight, format, std::nullopt, WeightUse::kForward, op);
    if (!keep_maxima && has_grouped_mlp(gate, down, weight_only)) {
      return {grouped_mlp_forward(gate, *up, down, {offs->contiguous()}),
              none_of(gate.options().dtype(at::kFloat))};
    }
    const SwigluOperand hidden(as_matrix(gate), as_matrix(*up));
    auto made = grouped_linear_forward(hidden.values(hidden.dtype()), weight, *offs, weight_only,
                                       format, /*saves_input=*/keep_maxima);
    return {made.output,
            made.saved.defined() ? made.saved : none_of(gate.options().dtype(at::kFloat))};
  }
  const auto used = checked_weight(weight, format, weight_state, WeightUse::kForward, op);
  const MlpActivation known = check_swiglu(op, gate, up, weight, activation);
  const SwigluOperand operand(as_matrix(gate), matrix_of(up), {}, known.function);
  auto result = linear_forward(operand, used, bias, /*save_quantized_input=*/false, weight_only,
                               residual_matrix(residual, gate, weight));
  auto sizes = gate.sizes().vec();
  sizes.back() = weight.size(0);
  if (gate.dim() != 2) result.output = at::_unsafe_view(result.output, sizes);
  const auto fp32 = gate.options().dtype(at::kFloat);
  if (!keep_maxima) return {result.output, none_of(fp32)};
  // A weight whose codes cannot be multiplied where they lie has left them unknown.
  Tensor maxima = operand.maxima();
  if (!maxima.defined()) {
    const auto sizes = operand.sizes();
    const Tensor amax = activation_amax(operand.values(operand.dtype()));
    maxima = swiglu_maxima(amax, sizes[0], sizes[1]);
  }
  return {result.output, maxima};
}

SwigluLinearGrads swiglu_linear_backward(
    const Tensor& grad, const Tensor& gate, const OptionalTensor& up, const Tensor& weight,
    const Tensor& maxima, bool needs_weight, bool rows, bool columns, bool joined,
    OptionalFormat grad_format, bool weight_only, std::optional<at::ScalarType> grad_dtype,
    OptionalFormat format, const WeightState& weight_state, const OptionalTensor& weight_grad,
    const OptionalTensor& offs, c10::string_view activation, const OptionalTensor& bias_grads) {
  PlainGuard guard;
  const char* op = "qshard::swiglu_linear_backward";
  c10::OptionalDeviceGuard device_guard(weight.device());
  if (is_given(offs)) {
    TORCH_CHECK(!is_given(bias_grads), op, ": offs go with no bias_grads");
    check_experts_activation(op, activation);
    check_swiglu(op, gate, up, weight, activation);
    return swiglu_backward_of_experts(op, grad, gate, *up, weight, maxima, *offs,
                                      {needs_weight, grad_dtype, weight, weight_grad, op},
                                      inner_gradients(op, rows, columns, joined, grad_format),
                                      weight_only, format, weight_state);
  }
  const auto use = backward_use(rows || columns);
  const auto used = checked_weight(weight, format, weight_state, use, op);
  const MlpActivation known = check_swiglu(op, gate, up, weight, activation);
  auto inner = inner_gradients(op, rows, columns, joined, grad_format);
  inner.column_sums = checked_bias_grads(op, bias_grads, inner, gate, up);
  return swiglu_backward_of(op, grad, gate, up, used, maxima,
                            {needs_weight, grad_dtype, weight, weight_grad, op}, inner, weight_only,
                            known);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> swiglu_linear_backward_accumulate(
    const Tensor& grad, const Tensor& gate, const OptionalTensor& up, const Tensor& weight,
    const Tensor& maxima, const Tensor& weight_grad, bool rows, bool columns, bool joined,
    OptionalFormat grad_format, bool weight_only, OptionalFormat format,
    const WeightState& weight_state, c10::string_view activation) {
  static const auto op =
      typed_op<decltype(swiglu_linear_backward)>("qshard::swiglu_linear_backward");
  auto [none, first, second, third, fourth] =
      op.call(grad, gate, up, weight, maxima, /*needs_weight=*/true, rows, columns, joined,
              grad_format, weight_only, std::nullopt, format, weight_state, weight_grad,
              std::nullopt, activation, std::nullopt);
  return {first, second, third, fourth};
}

}  // namespace qshard
