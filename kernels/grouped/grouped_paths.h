// How the linears of experts run: as one GEMM of codes, as one of values, or one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/gemm/gemm_report.h"
#include "kernels/grouped/expert_weights.h"
#include "kernels/grouped/grouped_codes.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/operand_producer.h"

namespace qshard {

/// One GEMM of all experts, before its operands are made.
struct GroupedProblem {
  GemmDirection direction = GemmDirection::kForward;  // as of a linear whose weight lies (out, in)
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kBFloat16;  // that of the input or gradient
  int64_t total = 0;                     // rows
  bool weight_only = false;
};

/// The way it runs, from sizes, device and the weights' place in memory, and why not on codes.
struct GroupedChoice {
  GroupedPath path = GroupedPath::kEach;
  GemmFallback why = GemmFallback::kNone;
};
GroupedChoice choose_grouped_path(const GroupedProblem& problem, const ExpertWeights& weights);
/// Whether a GEMM of x, an input or gradient (T, ...), runs on codes. Matrices lie as (out, in).
bool runs_on_codes(GemmDirection direction, const GivenOperand& x, const ExpertWeights& weights,
                   bool weight_only);
/// The path of a GEMM of x, an input or gradient (T, ...), whose direction is that of a weight that
/// lies as (out, in). backend_report() counts it.
GroupedPath record_path(GemmDirection direction, const GivenOperand& x,
                        const ExpertWeights& weights, bool weight_only);

// What runs on codes, packed or block-scaled, as the weights' format says.

/// quantize_packed_groups or quantize_block_scaled_groups. `rounding`: the words by which a
/// gradient is rounded stochastically; without, it is rounded to nearest.
GroupCodes quantize_groups(const GivenOperand& x, const Format& format, OperandRole role,
                           Orientations orientations, const RowGroups& groups,
                           const DelayedAmax& delayed, const GradientRounding& rounding = {});
/// x's rows times each expert's matrix: by its transpose, or with `contract` as it lies.
at::Tensor multiply_by_codes(const GroupCodes& x, const ExpertWeights& weights,
                             const RowGroups& groups, bool contract, at::ScalarType dtype);
/// (E, N, K) = gradient^T @ input of each expert's rows; `sum` as GroupedOperands has it.
at::Tensor multiply_columns(const GroupCodes& gradient, const GroupCodes& input, int64_t total,
                            const RowGroups& groups, at::ScalarType dtype, const at::Tensor& sum);

}  // namespace qshard
