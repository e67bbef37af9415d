// Operands of linears between the operators and kernels/linear/linear.h: what they check, and what
// they make of tensors.
#pragma once

#include <fmt/format.h>

#include <variant>

#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/linear/linear.h"
#include "ops/calls/ops.h"
#include "ops/linear/dynamic_weight.h"

namespace qshard {

/// A quantized weight, or a plain one that is quantized for this use, as `format` and `state` say.
/// @throws as quantize_for_use, and where there is a state without a format.
LinearWeight weight_for_use(const Tensor& weight, std::optional<c10::string_view> format,
                            WeightState state, WeightUse use, const char* op);
/// What a backward reads of a weight.
WeightUse backward_use(bool needs_input);

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

/// An input of wgrad, held without an allocation.
using WgradOperand = std::variant<PlainOperand, QuantizedOperand>;

template <typename Operand>
const OperandProducer& producer_of(const Operand& operand) {
  return std::visit([](const auto& kind) -> const OperandProducer& { return kind; }, operand);
}

/// The input of wgrad (M, K): as forward saved it, or itself. `m` rows, values of `options`.
WgradOperand wgrad_operand(const Tensor& input, bool is_quantized, int64_t m,
                           const at::TensorOptions& options, const QuantizedMatrix& weight);

/// What an operator returns where nothing is asked for.
inline Tensor none_of(const at::TensorOptions& options) { return at::empty({0}, options); }

/// Where a weight's gradient goes.
struct WeightGradient {
  bool is_needed = false;
  at::ScalarType dtype = at::kFloat;
  Tensor sum = {};  // it is added to this, if defined

  WeightGradient(bool is_needed, std::optional<at::ScalarType> grad_dtype, const Tensor& weight,
                 const char* op)
      : is_needed(is_needed), dtype(grad_dtype.value_or(weight.scalar_type())) {
    check(op);
  }
  WeightGradient(const Tensor& sum, const char* op)
      : is_needed(true), dtype(sum.scalar_type()), sum(sum) {
    check(op);
  }

  /// What an operator returns of it.
  Tensor result(const LinearBackward& made, const at::TensorOptions& options) const {
    return is_needed ? made.grad_weight : none_of(options.dtype(dtype));
  }

 private:
  void check(const char* op) const {
    TORCH_CHECK(is_value_dtype(dtype) && !(sum.defined() && has_key(sum)),
                fmt::format("{}: the weight's gradient must be a plain float32, bfloat16 or "
                            "float16 tensor, not {}",
                            op, sum.defined() ? describe(sum) : c10::toString(dtype)));
  }
};

/// The gradient of inputs, of `sizes`, that a GEMM adds to, as a matrix.
/// @throws c10::Error naming `op` and the argument unless it is needed, plain and contiguous.
Tensor input_gradient_to_add_to(const char* op, const char* name, const Tensor& gradient,
                                bool is_needed, at::IntArrayRef sizes);

/// The bytes of one orientation for an operator to return: (0,) if it is not there.
Tensor bytes_or_none(const CodeImage& codes, const Tensor& beside);

}  // namespace qshard
