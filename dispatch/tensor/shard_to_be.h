// Plain tensors that become shards when rows of one are copied into them.
#pragma once

#include <ATen/core/Tensor.h>

#include "dispatch/parts/placement.h"
#include "dispatch/parts/storage.h"

namespace qshard {

/// FSDP2 views what it gathers of a tensor that it cut by another dimension than the first as
/// elements: it takes as many bytes as the shard has elements.
/// @throws c10::NotImplementedError, on all ranks, unless `placement` is of a whole stack, whose
/// rows are codes alone, as many bytes. `sizes`: the shard's.
void check_can_cut_matrices(const Placement& placement, at::IntArrayRef sizes);

/// Memory for `sizes`, which must be sizes that a shard of the tensor `self` is a window of could
/// have: an ordinary tensor, without the key. It is marked: become_shard() may put a shard in its
/// place.
at::Tensor make_shard_to_be(const at::Tensor& self, at::IntArrayRef sizes,
                            const at::TensorOptions& options, Fill fill);

/// What trainers do by hand that make shards as FSDP2 does: `padded = weight.new_zeros(...)`, then
/// `padded.narrow(0, 0, n).copy_(rows)`. `self` is a plain tensor and `src` a quantized one. If
/// `self` lies in a marked tensor that was never written, from its row 0 on, that no other tensor
/// shares memory with, and `src` are the rows which belong there, all that there are, then the
/// marked tensor becomes their shard.
///
/// @return the window of the new shard that `self` was of the plain tensor, for copy_; undefined
/// where none was made.
at::Tensor become_shard(const at::Tensor& self, const at::Tensor& src);

}  // namespace qshard
