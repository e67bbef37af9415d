// SwiGLU MLPs of experts whose product and gradients pass in codes: as grouped_linear.h's linears
// compute them one after the other, without values between them.
#pragma once

#include "kernels/grouped/expert_weights.h"
#include "kernels/grouped/grouped_swiglu.h"
#include "kernels/linear/linear.h"

namespace qshard {

/// Whether the product of gate and up (T, K), of which `gate` is one, reaches down so.
bool has_grouped_mlp(const at::Tensor& gate, const ExpertWeights& down, bool weight_only);
/// Whether the gradients of gate and up do, too, and meet weights of their own in codes. `first`:
/// the weights of gate, which lie as up's do, or of both joined.
bool has_grouped_mlp_backward(const at::Tensor& input, const ExpertWeights& first,
                              const ExpertWeights& down, bool joined, bool weight_only);

/// (T, out): down times silu(gate) * up, rows of each expert by its own matrix.
at::Tensor grouped_mlp_forward(const at::Tensor& gate, const at::Tensor& up,
                               const ExpertWeights& down, const RowGroups& groups);

struct GroupedMlpBackwardTask {
  GivenOperand grad;  // (T, out), of the output
  at::Tensor gate, up;
  GroupSwigluRequest inner = {};
  bool needs_weight = false;  // down's gradient, as of GroupedBackwardTask
  at::ScalarType weight_grad_dtype = at::kFloat;
  at::Tensor sum = {};
};
struct GroupedMlpBackward {
  at::Tensor grad_weight;  // (experts, out, K), undefined unless it is asked for
  GroupCodes gate, up;     // their gradients
};
GroupedMlpBackward grouped_mlp_backward(const GroupedMlpBackwardTask& task,
                                        const ExpertWeights& down, const RowGroups& groups);

}  // namespace qshard
