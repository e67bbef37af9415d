#include "kernels/grouped/grouped_mlp.h"

#include <algorithm>

#include "kernels/grouped/grouped_paths.h"

namespace qshard {
namespace {

constexpr GemmDirection kDirections[] = {GemmDirection::kForward, GemmDirection::kGradInput,
                                         GemmDirection::kGradWeight};

/// Whether GEMMs of these directions run on codes that are scaled in blocks.
bool run_in_blocks(std::span<const GemmDirection> directions, const GivenOperand& x,
                   const ExpertWeights& weights, bool weight_only) {
  if (weights.transposed || !has_group_swiglu(*weights.stack.codes.format)) return false;
  return std::all_of(directions.begin(), directions.end(), [&](GemmDirection direction) {
    return runs_on_codes(direction, x, weights, weight_only);
  });
}

}  // namespace

bool has_grouped_mlp(const at::Tensor& gate, const ExpertWeights& down, bool weight_only) {
  constexpr GemmDirection kForward[] = {GemmDirection::kForward};
  return gate.numel() > 0 && run_in_blocks(kForward, gate, down, weight_only);
}

bool has_grouped_mlp_backward(const at::Tensor& input, const ExpertWeights& first,
                              const ExpertWeights& down, bool joined, bool weight_only) {
  const bool has_tiles = !joined || down.stack.codes.cols % 128 == 0;
  return input.numel() > 0 && has_tiles && run_in_blocks(kDirections, input, first, weight_only) &&
         run_in_blocks(kDirections, input, down, weight_only);
}

at::Tensor grouped_mlp_forward(const at::Tensor& gate, const at::Tensor& up,
                               const ExpertWeights& down, const RowGroups& groups) {
  record_path(GemmDirection::kForward, gate, down, /*weight_only=*/false);
  const GroupCodes product =
      quantize_swiglu_groups(gate, up, *down.stack.codes.format, {.rowwise = true}, groups);
  return multiply_by_codes(product, down, groups, /*contract=*/false, gate.scalar_type());
}

GroupedMlpBackward grouped_mlp_backward(const GroupedMlpBackwardTask& task,
                                        const ExpertWeights& down, const RowGroups& groups) {
  const Format& format = *down.stack.codes.format;
  const Orientations orientations{.rowwise = true, .columnwise = task.needs_weight};
  GroupCodes grad =
      quantize_groups(task.grad, format, OperandRole::kGradient, orientations, groups, {});
  record_path(GemmDirection::kGradInput, task.grad, down, /*weight_only=*/false);
  const at::Tensor of_product =
      multiply_by_codes(grad, down, groups, /*contract=*/true, task.grad->dtype());
  grad.rows = grad.row_scales = grad.saved_rows =
      at::Tensor();  // before the largest memory of an MLP
  GroupSwigluRequest request = task.inner;
  request.product = task.needs_weight ? &format : nullptr;
  GroupSwigluBackward made =
      quantize_swiglu_backward_groups(of_product, task.gate, task.up, request, groups);
  GroupedMlpBackward result{{}, std::move(made.gate), std::move(made.up)};
  if (task.needs_weight) {
    record_path(GemmDirection::kGradWeight, task.grad, down, /*weight_only=*/false);
    result.grad_weight = multiply_columns(grad, made.product, task.grad.rows(), groups,
                                          task.weight_grad_dtype, task.sum);
  }
  return result;
}

}  // namespace qshard
