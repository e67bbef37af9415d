// The backward of a linear, of a gradient that is values or codes.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/checked_sizes.h"
#include "ops/linear/autograd.h"
#include "ops/linear/grouped_linear.h"
#include "ops/linear/linear_operands.h"

namespace qshard {
namespace {

constexpr const char* kOp = "qshard::linear_backward";

/// A gradient (..., rows of the weight) as the operator was given it.
struct Gradient {
  ValuesOrCodes operand;
  at::DimVector sizes;
  at::TensorOptions options;  // of its values

  int64_t rows() const { return producer_of(operand).sizes()[0]; }
  /// The sizes of the input's gradient.
  at::DimVector of_input(const QuantizedMatrix& weight) const {
    at::DimVector result = sizes;
    if (!result.empty()) result.back() = weight.cols;
    return result;
  }
};

/// Values, or rows that arrived in codes.
Gradient gradient_as_given(const Tensor& grad, const QuantizedMatrix& weight) {
  return {given_or_values(grad, *weight.format, kOp), at::DimVector(grad.sizes()), grad.options()};
}

Gradient gradient_in_codes(const Tensor& rows, const Tensor& columns, at::IntArrayRef size,
                           at::ScalarType dtype, const QuantizedMatrix& weight, bool needs_input,
                           bool needs_weight, const OptionalTensor& scale) {
  const at::Device device = (needs_input ? rows : columns).device();
  TORCH_CHECK(!size.empty() && size.back() == weight.rows,
              fmt::format("{}: a gradient of shape {} does not fit a weight of ({}, {})", kOp, size,
                          weight.rows, weight.cols));
  const int64_t n = weight.rows;
  const int64_t m = checked_product(kOp, "grad_size", {size.data(), size.size() - 1});
  checked_product(kOp, "grad_size", {size.data(), size.size()});
  const auto is_of = [&](const Tensor& bytes, int64_t numel) {
    return bytes.device() == device && is_packed_buffer(bytes, numel, bytes);
  };
  TORCH_CHECK(is_value_dtype(dtype) && weight.format->gemm.kind == GemmKind::kPacked &&
                  (!needs_input || is_of(rows, packed_rowwise_bytes(m, n))) &&
                  (!needs_weight || is_of(columns, packed_columnwise_bytes(m, n))),
              fmt::format("{}: the codes of a gradient of shape {} must be uint8 of {} and {} "
                          "bytes on {}, to meet a float8 weight",
                          kOp, size, packed_rowwise_bytes(m, n), packed_columnwise_bytes(m, n),
                          device.str()));
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  auto codes = packed_matrix(*weight.format, OperandRole::kGradient, m, n,
                             needs_input ? rows : Tensor(), needs_weight ? columns : Tensor());
  if (is_given(scale)) {
    TORCH_CHECK(scale->numel() == 1 && scale->scalar_type() == at::kFloat && !has_key(*scale),
                fmt::format("{}: grad_scale must be plain float32 of one element, got {}", kOp,
                            describe(*scale)));
    codes = multiplied(std::move(codes), scale->reshape({1}));
  }
  return {QuantizedOperand(std::move(codes), options), at::DimVector(size), options};
}

/// What the input's gradient is added to, as a matrix; undefined if it is returned.
Tensor input_gradient_to_add_to(const OptionalTensor& sum, bool is_needed, at::IntArrayRef sizes) {
  if (!is_given(sum)) return {};
  TORCH_CHECK(is_needed && !has_key(*sum) && sum->is_contiguous() && sum->sizes() == sizes,
              fmt::format("{}: needs a plain contiguous input_sum of {}, where the gradient of "
                          "inputs is asked for; got {}",
                          kOp, sizes, describe(*sum)));
  return as_matrix(*sum);
}

}  // namespace

WeightUse backward_use(bool needs_input) {
  return needs_input ? WeightUse::kDgrad : WeightUse::kWgradOnly;
}

ValuesOrCodes wgrad_operand(const Tensor& input, bool is_quantized, int64_t m,
                            const at::TensorOptions& options, const QuantizedMatrix& weight) {
  if (!is_quantized) return given_or_values(input, *weight.format, kOp);
  const int64_t k = weight.cols;
  const at::Device device = options.device();
  const bool is_empty = m == 0 || weight.rows == 0 || k == 0;  // what is saved then is not read
  TORCH_CHECK(is_empty || (can_save_quantized_input(*weight.format, device, m, weight.rows, k) &&
                           input.device() == device &&
                           is_packed_buffer(input, packed_columnwise_bytes(m, k), input)),
              fmt::format("qshard: linear's saved input must be uint8 of {} bytes on {}, got {} {}",
                          packed_columnwise_bytes(m, k), device.str(),
                          c10::toString(input.scalar_type()), input.sizes().vec()));
  return QuantizedOperand(packed_matrix(*weight.format, OperandRole::kInput, m, k, {}, input),
                          options);
}

std::tuple<Tensor, Tensor> linear_backward_op(
    const Tensor& grad, const Tensor& weight, const Tensor& input, bool input_is_quantized,
    bool needs_input, bool needs_weight, bool weight_only, std::optional<at::ScalarType> grad_dtype,
    std::optional<c10::string_view> format, const WeightState& weight_state,
    const OptionalTensor& grad_columns, at::OptionalIntArrayRef grad_size,
    std::optional<at::ScalarType> value_dtype, const OptionalTensor& input_sum,
    const OptionalTensor& weight_grad, const OptionalTensor& offs,
    const OptionalTensor& grad_scale) {
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(weight.device());
  const bool in_codes = is_given(grad_columns);
  TORCH_CHECK_VALUE(grad_size.has_value() == in_codes && value_dtype.has_value() == in_codes, kOp,
                    ": grad_columns, grad_size and value_dtype say what the gradient in codes is; "
                    "give all of them or none");
  TORCH_CHECK_VALUE(!is_given(grad_scale) || (in_codes && !is_given(offs)), kOp,
                    ": grad_scale is of a gradient in codes, and not of experts'; multiply the "
                    "gradient by it");
  const WgradRequest wgrad(needs_weight, grad_dtype, weight, weight_grad, kOp);
  if (is_given(offs)) {
    std::optional<GradientInCodes> codes;
    if (in_codes) {
      TORCH_CHECK(grad_size->size() == 2, kOp, ": a gradient of experts is (rows, out), got ",
                  *grad_size);
      codes.emplace(GradientInCodes{*grad_columns, (*grad_size)[0], *value_dtype});
    }
    const auto made =
        grouped_linear_backward({grad, weight, input, input_is_quantized, *offs, needs_input,
                                 weight_only, format, weight_state, input_sum, codes},
                                needs_weight, wgrad.sum, wgrad.dtype);
    const auto values = in_codes ? grad.options().dtype(*value_dtype) : grad.options();
    return {needs_input ? made.grad_input : none_of(values), wgrad.result(made, values)};
  }
  auto used = weight_for_use(weight, format, weight_state, backward_use(needs_input), kOp);
  if (in_codes) check_expected_format(used, format);
  if (!in_codes && needs_input) take_arrived_tally(used, kWatchedGradient, grad);
  const Gradient gradient =
      in_codes ? gradient_in_codes(grad, *grad_columns, *grad_size, *value_dtype, used.codes,
                                   needs_input, needs_weight, grad_scale)
               : gradient_as_given(grad, used.codes);
  std::optional<ValuesOrCodes> saved;
  if (needs_weight) {
    saved = wgrad_operand(input, input_is_quantized, gradient.rows(), gradient.options, used.codes);
  }
  const auto sizes = gradient.of_input(used.codes);
  const Tensor sum = input_gradient_to_add_to(input_sum, needs_input, sizes);
  const auto made = linear_backward({.grad = &producer_of(gradient.operand),
                                     .needs_input = needs_input,
                                     .input_sum = sum,
                                     .input = saved ? &producer_of(*saved) : nullptr,
                                     .weight_grad_dtype = wgrad.dtype,
                                     .sum = wgrad.sum,
                                     .weight_only = weight_only},
                                    used);
  Tensor grad_input = none_of(gradient.options);
  if (needs_input && !sum.defined()) {
    // Detached from the 2-D result, so that N-D gradients are no views.
    grad_input = sizes.size() == 2 ? made.grad_input : at::_unsafe_view(made.grad_input, sizes);
  }
  return {grad_input, wgrad.result(made, gradient.options)};
}

namespace {

const auto& call_linear_backward() {
  static const auto op = typed_op<decltype(linear_backward_op)>(kOp);
  return op;
}

}  // namespace

Tensor linear_backward_accumulate(const Tensor& grad, const Tensor& weight, const Tensor& input,
                                  bool input_is_quantized, bool needs_input,
                                  const Tensor& weight_grad, bool weight_only,
                                  std::optional<c10::string_view> format,
                                  const WeightState& weight_state) {
  return std::get<0>(call_linear_backward().call(
      grad, weight, input, input_is_quantized, needs_input, /*needs_weight=*/true, weight_only,
      std::nullopt, format, weight_state, std::nullopt, std::nullopt, std::nullopt, std::nullopt,
      weight_grad, std::nullopt, std::nullopt));
}

std::tuple<Tensor, Tensor> linear_backward_codes(
    const Tensor& rows, const Tensor& columns, at::IntArrayRef size, at::ScalarType dtype,
    const Tensor& weight, const Tensor& input, bool input_is_quantized, bool needs_input,
    bool needs_weight, std::optional<at::ScalarType> grad_dtype,
    std::optional<c10::string_view> format, const WeightState& weight_state,
    const OptionalTensor& input_sum) {
  return call_linear_backward().call(rows, weight, input, input_is_quantized, needs_input,
                                     needs_weight, /*weight_only=*/false, grad_dtype, format,
                                     weight_state, columns, size, dtype, input_sum, std::nullopt,
                                     std::nullopt, std::nullopt);
}

Tensor linear_backward_codes_accumulate(
    const Tensor& rows, const Tensor& columns, at::IntArrayRef size, at::ScalarType dtype,
    const Tensor& weight, const Tensor& input, bool input_is_quantized, bool needs_input,
    const Tensor& weight_grad, std::optional<c10::string_view> format,
    const WeightState& weight_state, const OptionalTensor& input_sum) {
  return std::get<0>(call_linear_backward().call(
      rows, weight, input, input_is_quantized, needs_input, /*needs_weight=*/true,
      /*weight_only=*/false, std::nullopt, format, weight_state, columns, size, dtype, input_sum,
      weight_grad, std::nullopt, std::nullopt));
}

}  // namespace qshard
