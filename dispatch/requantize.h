// Requantizing many buffers together: one amax pass, at most one all-reduce per group, one quantize
// pass.
#pragma once

#include <string>
#include <vector>

#include "dispatch/quantized_buffer.h"
#include "kernels/scaling_state.h"

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
void all_reduce_max(at::Tensor bits, const std::string& group);

/// Buffers that requantize together: of one device and one group.
struct Batch {
  at::Device device;
  std::string group;           // empty: no collective
  std::string replica_groups;  // where there are replicas that see other activations
  std::vector<BufferPtr> buffers;
};

struct RequantizeOptions {
  FlushKind kind = FlushKind::kOthers;
  at::Tensor found_inf = {};
  /// kKeep: another flush, that all ranks take part in, is to follow. The state stays as it was,
  /// too.
  QuantizedBuffer::Pending pending = QuantizedBuffer::Pending::kDrop;
  at::Tensor* amax = nullptr;  // takes the agreed amaxes of all buffers, one after the other
};

/// Requantizes a batch's buffers, those that are settled as far as it takes. Nothing is written
/// before the ranks have agreed, so an error leaves every buffer as it was. What it means for the
/// buffers, shown or agreed, is the caller's to say.
/// @throws what the group's all-reduce throws: a peer that is gone, a timeout.
void requantize(const Batch& batch, const RequantizeOptions& options);

}  // namespace qshard
