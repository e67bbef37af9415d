// Flush: bring images up to date with their values. One amax pass, at most one all-reduce per
// reduction group, one quantize pass.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>

#include "dispatch/quantized_buffer.h"

namespace qshard {

/// What a flush needs of a reduction group. fsdp/ provides it.
struct GroupOperations {
  /// MAX over all ranks of the group, in place, on int32 (the bits of non-negative floats order as
  /// the floats do, with NaN on top, on every backend).
  void (*all_reduce_max)(at::Tensor& bits, const std::string& group) = nullptr;
  /// Number of ranks.
  int64_t (*size)(const std::string& group) = nullptr;
};
void set_group_operations(GroupOperations operations);

/// Number of ranks of a reduction group; 1 where there is none ("").
int64_t ranks_of(const std::string& group);

/// Whether requantizing this buffer needs no other rank.
bool can_flush_locally(const QuantizedBuffer& buffer);

/// Requantizes one stale buffer without a collective. It stays dirty if other ranks may share it: a
/// one-row weight on two ranks looks whole on one of them, and they must still meet.
/// @throws c10::Error if !can_flush_locally.
void flush_locally(const BufferPtr& buffer);

/// For readers of image or grid (codes, GEMM, byte copies): flushes locally, or throws an error
/// that names `op` and the way out. A shard cut at block boundaries shows exact codes of its own
/// rows.
void require_fresh_image(const BufferPtr& buffer, const char* op);

/// Flushes the dirty buffers, in the given order; the list must be the same on all ranks of each
/// buffer's group. `kind` and `found_inf` (undefined, or GradScaler's): kernels/scaling_state.h.
void flush(const std::vector<BufferPtr>& buffers, FlushKind kind = FlushKind::kOthers,
           const at::Tensor& found_inf = {});

/// As flush(), but first agrees on what is dirty on any rank: also right after a write that only
/// some ranks made.
void flush_any_dirty(const std::vector<BufferPtr>& buffers);

/// The grid as gathered tensors may hold it: a later flush leaves it alone.
at::Tensor grid_snapshot(QuantizedBuffer& buffer);

}  // namespace qshard
