// How the linears of experts run: as one GEMM of codes, as one of values, or one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/gemm/gemm_report.h"
#include "kernels/grouped/expert_weights.h"
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

}  // namespace qshard
