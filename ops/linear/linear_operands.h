// Operands of linears between the operators and kernels/linear/linear.h: what they check, and what
// they make of tensors.
#pragma once

#include <fmt/format.h>

#include <variant>

#include "dispatch/aten/matmul.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/linear/linear.h"
#include "ops/calls/ops.h"
#include "ops/linear/dynamic_weight.h"

namespace qshard {

/// A quantized weight, or a plain one that is quantized for this use, as `format` and `state` say.
/// @throws as quantize_for_use, and where there is a state without a format.
LinearWeight weight_for_use(const Tensor& weight, std::optional<c10::string_view> format,
                            const WeightState& state, WeightUse use, const char* op);
/// @throws c10::Error naming `op` where codes of `format` do not follow from the values alone.
void check_codes_can_be_made_again(const Format& format, const char* op);
/// What a backward reads of a weight.
WeightUse backward_use(bool needs_input);

/// An input or gradient that was counted before it was sent in codes is not counted by the linear.
inline void take_arrived_tally(LinearWeight& used, WatchedOperand operand, const Tensor& given) {
  if (!used.watched || !used.watched->is_sampled()) return;
  if (used.watched->add_kept(operand, given)) used.watched = nullptr;
}

/// (..., columns) as (rows, columns); the value of a quantized tensor.
Tensor as_matrix(const Tensor& tensor);

/// @throws c10::Error for an input that is no value tensor (..., columns of the weight) beside it,
/// and for a bias that is not (rows of the weight,).
void check_linear_shapes(const Tensor& input, const Tensor& weight, const OptionalTensor& bias);

/// What is added to the output of a linear, as a matrix, contiguous; undefined if there is nothing.
/// @throws c10::Error if it is not a plain tensor of the output's shape, dtype and device.
Tensor residual_matrix(const OptionalTensor& residual, const Tensor& input, const Tensor& weight);

/// A module knows its weight's format from quantize_; the weight may have been replaced since.
/// @throws c10::Error if the weight has another one.
void check_expected_format(const LinearWeight& weight, std::optional<c10::string_view> format);

/// Whether `bytes` can be packed codes of that size, on the device of `beside`.
bool is_packed_buffer(const Tensor& bytes, int64_t numel, const Tensor& beside);

/// An input or a gradient as an operator was given it, held without an allocation.
using ValuesOrCodes = std::variant<PlainOperand, QuantizedOperand, ArrivedOperand>;

template <typename Operand>
const OperandProducer& producer_of(const Operand& operand) {
  return std::visit([](const auto& kind) -> const OperandProducer& { return kind; }, operand);
}

/// x (..., K) to meet a weight of `format`: rows that arrived in codes, or its value.
inline ValuesOrCodes given_or_values(const Tensor& x, const Format& format, const char* op) {
  if (auto arrived = arrived_operand(x, format, op)) return *std::move(arrived);
  return PlainOperand(as_matrix(x));
}

/// The input of wgrad (M, K): as forward saved it, or itself. `m` rows, values of `options`.
ValuesOrCodes wgrad_operand(const Tensor& input, bool is_quantized, int64_t m,
                            const at::TensorOptions& options, const QuantizedMatrix& weight);

/// What an operator returns where nothing is asked for.
inline Tensor none_of(const at::TensorOptions& options) { return at::empty({0}, options); }

/// A weight's gradient as the caller of an operator asks for it.
struct WgradRequest {
  bool is_needed = false;
  at::ScalarType dtype = at::kFloat;
  Tensor sum = {};  // it is added to this, if defined

  /// @throws c10::Error naming `op` for a dtype or a `weight_grad` that no GEMM writes, and for one
  /// to add to that is not needed.
  WgradRequest(bool is_needed, std::optional<at::ScalarType> grad_dtype, const Tensor& weight,
               const OptionalTensor& weight_grad, const char* op)
      : is_needed(is_needed), dtype(grad_dtype.value_or(weight.scalar_type())) {
    if (is_given(weight_grad)) {
      sum = *weight_grad;
      dtype = sum.scalar_type();
      TORCH_CHECK(is_needed, op, ": weight_grad is given, and needs_weight is false");
      TORCH_CHECK(
          is_value_dtype(dtype) && !has_key(sum),
          fmt::format("{}: weight_grad must be a plain float32, bfloat16 or float16 tensor, "
                      "got {}",
                      op, describe(sum)));
    }
    TORCH_CHECK(is_value_dtype(dtype),
                fmt::format("{}: grad_dtype {} is not supported; use float32, bfloat16 or float16",
                            op, c10::toString(dtype)));
  }

  /// What an operator returns of it.
  Tensor result(const LinearBackward& made, const at::TensorOptions& options) const {
    const bool is_returned = is_needed && !sum.defined();
    return is_returned ? made.grad_weight : none_of(options.dtype(dtype));
  }
};

/// The bytes of one orientation for an operator to return: (0,) if it is not there.
Tensor bytes_or_none(const CodeImage& codes, const Tensor& beside);

}  // namespace qshard
