// The linears of experts: groups of rows, each with a matrix of its own.
//
// Each group is a linear as kernels/linear/linear.h has it: its rows are quantized by themselves,
// and what it computes does not depend on the groups beside it. FP8 codes in blocks are multiplied
// in one GEMM on Hopper, MXFP8 and NVFP4 in torch's on Blackwell; what has no such GEMM is
// dequantized and multiplied in bfloat16 by torch's grouped GEMM. The host waits for neither.
// Elsewhere one linear runs after the other, for which the host reads where groups end.
// backend_report() lists all three.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/grouped/expert_weights.h"
#include "kernels/grouped/grouped_codes.h"
#include "kernels/grouped/row_groups.h"
#include "kernels/linear/linear.h"

namespace qshard {

struct GroupedForward {
  at::Tensor output;  // (T, out) in the input's dtype
  at::Tensor saved;   // the codes of the input that wgrad reads, undefined unless they are saved
};

/// Rows of expert e are linear_forward of x's; those of none are 0. `saves_input`: where
/// can_save_expert_codes says so.
GroupedForward grouped_forward(const GivenOperand& x, const ExpertWeights& weights,
                               const RowGroups& groups, bool weight_only, bool saves_input = false);

/// Whether autograd may keep codes of x (T, in) in its place: GEMMs of codes run forward and wgrad,
/// and the codes, in which each expert begins at a multiple of 128 columns, take less memory by a
/// quarter or more. The same pass makes them that makes forward's.
bool can_save_expert_codes(const at::Tensor& x, const ExpertWeights& weights, bool weight_only);

/// The operands of grouped_backward, and which gradients it computes.
struct GroupedBackwardTask {
  GivenOperand grad;  // (T, out)
  // Its codes, in the orientations that are read: then of `grad` size, dtype and device alone
  // count.
  std::optional<GroupCodes> grad_codes = {};
  bool needs_input = false;
  GivenOperand input = {};      // (T, in); undefined: grad_weight is not asked for
  bool input_is_codes = false;  // `input` is GroupedForward::saved
  at::ScalarType weight_grad_dtype = at::kFloat;
  at::Tensor sum = {};  // (experts, out, in), contiguous: as of LinearBackwardTask
  bool weight_only = false;
};

/// Runs linear_backward for each expert. grad_input is (T, in); rows that belong to no expert are
/// 0. grad_weight is (experts, out, in), and 0 for an expert without rows; where `sum` is given it
/// is `sum`, in which the part of such an expert stays unchanged.
LinearBackward grouped_backward(const GroupedBackwardTask& task, const ExpertWeights& weights,
                                const RowGroups& groups);

}  // namespace qshard
