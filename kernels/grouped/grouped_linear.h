// The linears of experts: groups of rows, each with a matrix of its own.
//
// Each group is a linear as kernels/linear/linear.h has it: its rows are quantized by themselves,
// and what it computes does not depend on the groups beside it.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/linear/linear.h"

namespace qshard {

/// The matrices of experts, rows of one row image that lie one after the other.
struct ExpertWeights {
  LinearWeight stack;       // all their rows, of the image's width
  int64_t count = 0;        // experts
  int64_t rows = 0;         // image rows of each expert's matrix
  int64_t step = 0;         // image rows from one matrix to the next; 0: all experts share one
  bool transposed = false;  // they lie as (in, out): forward multiplies as dgrad of others does

  int64_t out_features() const { return transposed ? stack.codes.cols : rows; }
  int64_t in_features() const { return transposed ? rows : stack.codes.cols; }
  /// The matrix of one expert, as it lies.
  LinearWeight matrix(int64_t expert) const;
};

/// Rows of x of each expert: those of expert e end before row offs[e], where those of the next one
/// begin; rows after the last one's belong to none. int32 (experts,), contiguous, beside x. Ends
/// that decrease or lie behind the last row count as the nearest that does not.
struct RowGroups {
  at::Tensor offs;
};

/// (T, out) in the input's dtype: rows of expert e are linear_forward of x's; those of none are 0.
at::Tensor grouped_forward(const at::Tensor& x, const ExpertWeights& weights,
                           const RowGroups& groups, bool weight_only);

/// The operands of grouped_backward, and which gradients it computes.
struct GroupedBackwardTask {
  at::Tensor grad;  // (T, out)
  bool needs_input = false;
  at::Tensor input = {};  // (T, in); undefined: grad_weight is not asked for
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
