#include "kernels/grouped/grouped_linear.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/device/capture.h"
#include "kernels/grouped/grouped_codes.h"
#include "kernels/grouped/grouped_paths.h"
#include "kernels/grouped/grouped_values.h"
#include "kernels/grouped/shared_codes.h"

namespace qshard {
namespace {

/// The rows of one expert.
struct Rows {
  int64_t expert = 0;
  int64_t first = 0;
  int64_t count = 0;

  GivenOperand of(const GivenOperand& matrix) const { return matrix.narrowed(first, count); }
};

/// The host waits for the device that has `offs`.
/// @throws c10::Error while a CUDA graph is captured.
std::vector<Rows> rows_of_experts(const RowGroups& groups, int64_t total) {
  TORCH_CHECK(
      !is_capturing(groups.offs.device()),
      "qshard::grouped_linear: these experts run one after the other, and a CUDA graph cannot "
      "capture that, because the host reads offs; backend_report() says why. Use bfloat16 "
      "inputs on a GPU of compute capability 9.0 or 10");
  const at::Tensor offs = groups.offs.cpu();
  const auto* ends = offs.const_data_ptr<int32_t>();
  std::vector<Rows> rows;
  int64_t first = 0;
  for (int64_t expert = 0; expert < offs.numel(); ++expert) {
    const int64_t end = std::clamp<int64_t>(ends[expert], first, total);
    rows.push_back({expert, first, end - first});
    first = end;
  }
  return rows;
}

/// Products of experts as one matrix of `total` rows, the last of which belong to none.
class Products {
 public:
  Products(int64_t total, int64_t columns, const at::TensorOptions& options)
      : left_(total), columns_(columns), options_(options) {}

  void add(at::Tensor product) {
    left_ -= product.size(0);
    parts_.push_back(std::move(product));
  }
  at::Tensor joined() && {
    if (left_ > 0 || parts_.empty()) parts_.push_back(at::zeros({left_, columns_}, options_));
    return parts_.size() == 1 ? parts_[0] : at::cat(parts_);
  }

 private:
  int64_t left_;
  int64_t columns_;
  at::TensorOptions options_;
  std::vector<at::Tensor> parts_;
};

at::Tensor forward_of_one(const GivenOperand& x, const ExpertWeights& weights, int64_t expert,
                          bool weight_only, GradientRounding& rounding) {
  const LinearWeight weight = weights.matrix(expert);
  if (!weights.transposed) {
    return linear_forward(*x, weight, std::nullopt, false, weight_only).output;
  }
  return linear_backward({.grad = &*x,
                          .needs_input = true,
                          .weight_only = weight_only,
                          .rounding = &rounding,
                          .group = expert},
                         weight)
      .grad_input;
}

/// The gradients where the matrix lies as (in, out). Its own is that of a plain product, as torch's
/// matmul with a transposed weight computes it.
LinearBackward backward_of_transposed(const GroupedBackwardTask& task, const GivenOperand& grad,
                                      const GivenOperand& input, const ExpertWeights& weights,
                                      int64_t expert) {
  LinearBackward made;
  if (task.needs_input) {
    made.grad_input =
        linear_forward(*grad, weights.matrix(expert), std::nullopt, false, task.weight_only).output;
  }
  if (input.defined()) {
    made.grad_weight =
        at::mm(input.values().t(), grad.values().to(input->dtype())).to(task.weight_grad_dtype).t();
  }
  return made;
}

LinearBackward backward_of_one(const GroupedBackwardTask& task, const GivenOperand& grad,
                               const GivenOperand& input, const at::Tensor& sum,
                               const ExpertWeights& weights, int64_t expert,
                               GradientRounding& rounding) {
  if (weights.transposed) return backward_of_transposed(task, grad, input, weights, expert);
  return linear_backward({.grad = &*grad,
                          .needs_input = task.needs_input,
                          .input = input.defined() ? &*input : nullptr,
                          .weight_grad_dtype = task.weight_grad_dtype,
                          .sum = sum,
                          .weight_only = task.weight_only,
                          .rounding = &rounding,
                          .group = expert},
                         weights.matrix(expert));
}

/// An empty gradient of the weights, in memory where each expert's lies as its matrix does.
at::Tensor empty_weight_gradient(const ExpertWeights& weights, const at::TensorOptions& options) {
  const int64_t count = weights.count, out = weights.out_features(), in = weights.in_features();
  return weights.transposed ? at::empty({count, in, out}, options).transpose(1, 2)
                            : at::empty({count, out, in}, options);
}

/// Delayed scaling collects the amax of what would be quantized: that of all experts' rows.
void collect_amax(const at::Tensor& x, const RowGroups& groups, const DelayedAmax& delayed) {
  if (!delayed || x.size(0) == 0) return;
  const at::Tensor live = x.clone();
  zero_rows_of_none(live, groups.ends(x.size(0)));
  qshard::collect_amax(live, delayed);
}

at::Tensor forward_of_each(const GivenOperand& x, const ExpertWeights& weights,
                           const RowGroups& groups, bool weight_only) {
  const int64_t total = x.rows();
  Products outputs(total, weights.out_features(), x->options());
  GradientRounding rounding;
  for (const Rows& rows : rows_of_experts(groups, total)) {
    if (rows.count > 0) {
      outputs.add(forward_of_one(rows.of(x), weights, rows.expert, weight_only, rounding));
    }
  }
  return std::move(outputs).joined();
}

LinearBackward backward_of_each(const GroupedBackwardTask& task, const ExpertWeights& weights,
                                const RowGroups& groups) {
  const GivenOperand& grad = task.grad;
  const int64_t total = grad.rows();
  LinearBackward result;
  if (task.input.defined()) {
    result.grad_weight =
        task.sum.defined()
            ? task.sum
            : empty_weight_gradient(weights, grad->options().dtype(task.weight_grad_dtype));
  }
  Products grad_inputs(total, weights.in_features(), grad->options());
  GradientRounding rounding;
  for (const Rows& rows : rows_of_experts(groups, total)) {
    at::Tensor own;
    if (result.grad_weight.defined()) own = result.grad_weight.select(0, rows.expert);
    if (rows.count == 0) {
      if (own.defined() && !task.sum.defined()) own.zero_();
      continue;
    }
    const GivenOperand input = task.input.defined() ? rows.of(task.input) : GivenOperand();
    const at::Tensor sum = task.sum.defined() ? own : at::Tensor();
    LinearBackward made =
        backward_of_one(task, rows.of(grad), input, sum, weights, rows.expert, rounding);
    if (task.needs_input) grad_inputs.add(std::move(made.grad_input));
    if (!own.defined()) continue;
    if (!sum.defined()) {
      own.copy_(made.grad_weight);
    } else if (!made.grad_weight.is_same(sum)) {
      own.add_(made.grad_weight);
    }
  }
  if (task.needs_input) result.grad_input = std::move(grad_inputs).joined();
  return result;
}

/// The gradient of the weights, on codes; `grad` has columns.
at::Tensor weight_gradient_of_codes(const GroupedBackwardTask& task, const GroupCodes& grad,
                                    const LinearWeight& weight, const RowGroups& groups) {
  const Format& format = *weight.codes.format;
  const GroupCodes input =
      task.input_is_codes
          ? restored_codes({}, task.input.values(), format, OperandRole::kInput, task.grad.rows(),
                           weight.codes.cols, groups)
          : quantize_groups(task.input, format, OperandRole::kInput, {.columnwise = true}, groups,
                            delayed_input_amax(weight));
  return multiply_columns(grad, input, task.grad.rows(), groups, task.weight_grad_dtype, task.sum);
}

/// The same on values, which lies as the matrices do.
at::Tensor weight_gradient_of_values(const GroupedBackwardTask& task, const ExpertWeights& weights,
                                     const RowGroups& groups) {
  const at::Tensor grad = task.grad.values();
  const at::Tensor input = task.input.values().to(grad.scalar_type());
  const auto dtype = task.weight_grad_dtype;
  if (!weights.transposed) return multiply_transposed(grad, input, groups, dtype, task.sum);
  const at::Tensor made = multiply_transposed(input, grad, groups, dtype, {}).transpose(1, 2);
  if (!task.sum.defined()) return made;
  at::Tensor out = task.sum;
  return out.add_(made);
}

}  // namespace

LinearWeight ExpertWeights::matrix(int64_t expert) const {
  LinearWeight weight = stack;
  RowImage image = stack.codes.row_image();
  image.first_row += expert * step;
  weight.codes = matrix_of(std::move(image), rows);
  return weight;
}

bool can_save_expert_codes(const at::Tensor& x, const ExpertWeights& weights, bool weight_only) {
  const Format& format = *weights.stack.codes.format;
  if (weights.transposed || x.numel() == 0 || format.gemm.kind != GemmKind::kPacked) return false;
  return runs_on_codes(GemmDirection::kForward, x, weights, weight_only) &&
         runs_on_codes(GemmDirection::kGradWeight, x, weights, weight_only) &&
         saved_columns_bytes(format, x.size(0), x.size(1), weights.count) <=
             static_cast<int64_t>(x.nbytes()) * 3 / 4;
}

GroupedForward grouped_forward(const GivenOperand& x, const ExpertWeights& weights,
                               const RowGroups& groups, bool weight_only, bool saves_input) {
  const Format& format = *weights.stack.codes.format;
  const GroupedPath path = record_path(GemmDirection::kForward, x, weights, weight_only);
  TORCH_CHECK(!saves_input || path == GroupedPath::kCodes,
              "qshard::linear_forward: save_quantized_input, where the experts' input is not "
              "multiplied in codes");
  switch (path) {
    case GroupedPath::kCodes: {
      const Orientations made{.rowwise = true, .columnwise = saves_input};
      const GroupCodes codes =
          SharedGroupCodes::of_input(x, format, made, groups, delayed_input_amax(weights.stack));
      return {multiply_by_codes(codes, weights, groups, weights.transposed, x->dtype()),
              codes.saved};
    }
    case GroupedPath::kValues:
      if (!weight_only) collect_amax(x.values(), groups, delayed_input_amax(weights.stack));
      return {multiply_by_values(x.values(), weights, groups, weights.transposed), {}};
    case GroupedPath::kEach:
      break;
  }
  return {forward_of_each(x, weights, groups, weight_only), {}};
}

LinearBackward grouped_backward(const GroupedBackwardTask& task, const ExpertWeights& weights,
                                const RowGroups& groups) {
  const Format& format = *weights.stack.codes.format;
  const GivenOperand& grad = task.grad;
  const auto path = [&](GemmDirection direction) {
    return record_path(direction, grad, weights, task.weight_only);
  };
  GroupedPath for_input = GroupedPath::kEach, for_weight = GroupedPath::kEach;
  if (task.needs_input) for_input = path(GemmDirection::kGradInput);
  if (task.input.defined()) for_weight = path(GemmDirection::kGradWeight);
  TORCH_CHECK(!task.input_is_codes || for_weight == GroupedPath::kCodes,
              "qshard::linear_backward: the experts' input was saved in codes, and their gradient "
              "is not multiplied in codes");
  const Orientations codes{for_input == GroupedPath::kCodes, for_weight == GroupedPath::kCodes};
  TORCH_CHECK(
      !task.grad_codes ||
          (codes.rowwise == task.needs_input && codes.columnwise == task.input.defined()),
      "qshard::linear_backward: the experts' gradient is in codes, and is not multiplied in "
      "codes");
  LinearBackward result;
  if (codes.rowwise || codes.columnwise) {
    GradientRounding rounding;
    if (codes.rowwise) rounding.rows = gradient_rounding(format, grad->device(), nullptr, 0);
    if (codes.columnwise) rounding.columns = gradient_rounding(format, grad->device(), nullptr, 0);
    const GroupCodes quantized =
        task.grad_codes ? *task.grad_codes
                        : quantize_groups(grad, format, OperandRole::kGradient, codes, groups,
                                          delayed_gradient_amax(weights.stack), rounding);
    if (codes.rowwise) {
      result.grad_input =
          multiply_by_codes(quantized, weights, groups, !weights.transposed, grad->dtype());
    }
    if (codes.columnwise) {
      result.grad_weight = weight_gradient_of_codes(task, quantized, weights.stack, groups);
    }
  }
  if (for_input == GroupedPath::kValues || for_weight == GroupedPath::kValues) {
    const at::Tensor values = grad.values();
    if (!task.weight_only) collect_amax(values, groups, delayed_gradient_amax(weights.stack));
    if (for_input == GroupedPath::kValues) {
      result.grad_input = multiply_by_values(values, weights, groups, !weights.transposed);
    }
    if (for_weight == GroupedPath::kValues) {
      result.grad_weight = weight_gradient_of_values(task, weights, groups);
    }
  }
  GroupedBackwardTask left = task;
  left.needs_input = task.needs_input && for_input == GroupedPath::kEach;
  if (for_weight != GroupedPath::kEach) {
    left.input = {};
    left.sum = at::Tensor();
  }
  if (left.needs_input || left.input.defined()) {
    LinearBackward made = backward_of_each(left, weights, groups);
    if (left.needs_input) result.grad_input = std::move(made.grad_input);
    if (left.input.defined()) result.grad_weight = std::move(made.grad_weight);
  }
  return result;
}

}  // namespace qshard
