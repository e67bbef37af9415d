// The linears of experts: what the operators of linears run where `offs` says which rows are whose.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "dispatch/aten/matmul.h"
#include "kernels/grouped/grouped_linear.h"
#include "ops/calls/ops.h"
#include "ops/linear/autograd.h"
#include "ops/linear/dynamic_weight.h"

namespace qshard {

/// input (T, in) times weight (experts, out, in), rows of each expert by its own matrix.
/// @throws c10::Error for operands that do not fit, ValueError for an unknown format.
Tensor grouped_linear(const Tensor& input, const Tensor& weight, const Tensor& offs,
                      bool weight_only, std::optional<c10::string_view> format);
Tensor grouped_linear_autograd(const Tensor& input, const Tensor& weight, const Tensor& offs,
                               bool weight_only, std::optional<c10::string_view> format);
Tensor grouped_linear_meta(const Tensor& input, const Tensor& weight, const Tensor& offs,
                           bool weight_only, std::optional<c10::string_view> format);

/// _grouped_mm where a gradient may be asked for; below autograd dispatch/aten has it.
Tensor aten_grouped_mm_autograd(const Tensor& input, const Tensor& weight,
                                const OptionalTensor& offs, const OptionalTensor& bias,
                                std::optional<at::ScalarType> out_dtype);

/// `transformers::grouped_mm_fallback(input, weight, offs)` and its backward, by which transformers
/// multiplies experts where torch.compile traces weights that are not bf16 (its
/// integrations/moe.py): as _grouped_mm. Other operands, and other arguments than the three of
/// transformers 5.23, are left to transformers' own kernel.
void transformers_grouped_mm(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack);
void transformers_grouped_mm_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                      torch::jit::Stack* stack);

/// As weight_for_use of a linear. Matrices are quantized apart from each other, in a stack, too.
ExpertWeights experts_for_use(const Tensor& weight, std::optional<c10::string_view> format,
                              const WeightState& state, WeightUse use, const char* op);

/// linear_forward with `offs`.
GroupedForward grouped_linear_forward(const Tensor& input, const Tensor& weight, const Tensor& offs,
                                      bool weight_only, std::optional<c10::string_view> format,
                                      bool saves_input = false);

/// What autograd keeps of experts' input: its codes, or itself.
InputUse input_use_of_experts(const Tensor& input, const Tensor& weight, const LinearNeeds& needs,
                              bool weight_only);

/// What linear_backward is told of a gradient in codes, GroupCodes::saved_rows.
struct GradientInCodes {
  const Tensor& columns;  // GroupCodes::saved
  int64_t total;          // rows
  at::ScalarType dtype;   // of its values
};

/// The arguments of linear_backward that a call with `offs` uses.
struct GroupedLinearBackward {
  const Tensor& grad;
  const Tensor& weight;
  const Tensor& input;
  bool input_is_codes;  // GroupedForward::saved
  const Tensor& offs;
  bool needs_input;
  bool weight_only;
  std::optional<c10::string_view> format;
  const WeightState& weight_state;
  const OptionalTensor& input_sum;
  std::optional<GradientInCodes> codes = {};  // of `grad`
};

/// linear_backward with `offs`; `sum` and `dtype` of the weight's gradient, if it is needed.
LinearBackward grouped_linear_backward(const GroupedLinearBackward& call, bool needs_weight,
                                       const Tensor& sum, at::ScalarType dtype);

/// The sizes of both, of sizes that may be symbols.
void check_grouped_sizes(const char* op, const Tensor& x, const Tensor& weight, int64_t weight_dim,
                         const Tensor& offs);

}  // namespace qshard
