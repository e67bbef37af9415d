// silu(gate) * up of experts and its gradients, in codes that are made in registers, as
// kernels/linear/swiglu_quantize.h makes those of an MLP. FP8 on Hopper, with scales in blocks.
#pragma once

#include "kernels/grouped/grouped_codes.h"

namespace qshard {

/// Whether codes that meet weights of this format can be made so: of E4M3, scaled in blocks.
bool has_group_swiglu(const Format& format);

/// quantize_groups(silu(gate) * up): gate and up (T, K), whose rows may be parts of longer ones.
GroupCodes quantize_swiglu_groups(const at::Tensor& gate, const at::Tensor& up,
                                  const Format& format, Orientations orientations,
                                  const RowGroups& groups);

/// What is asked for of a gradient of silu(gate) * up.
struct GroupSwigluRequest {
  const Format* gradients = nullptr;  // the format of gate and up, which their gradients meet
  Orientations orientations = {};     // those of the gradients
  bool joined = false;                // as of one matrix (T, 2 K): K is a multiple of 128
  const Format* product = nullptr;    // columns of silu(gate) * up, to meet a weight of it; or none
};

struct GroupSwigluBackward {
  GroupCodes gate = {};  // of both if joined
  GroupCodes up = {};
  GroupCodes product = {};
};

/// The codes that quantize_groups makes of swiglu_gradients(grad, gate, up), in one pass. grad: (T,
/// K).
GroupSwigluBackward quantize_swiglu_backward_groups(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up,
                                                    const GroupSwigluRequest& request,
                                                    const RowGroups& groups);

}  // namespace qshard
