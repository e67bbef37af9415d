// Requantizing many buffers together: one amax pass, at most one all-reduce per group, one quantize
// pass.
//
// Ranks agree on one vector. In front lies what belongs to full tensors, their scales' amaxes and
// state; behind it what belongs to blocks. All of it is reduced over the ranks that hold rows of
// the same logical tensors, the front then over those that hold other parts of the full ones: a
// block ends with its logical tensor. Weights that share a tensor scale then take the largest of
// their amaxes, which is the same on all ranks because all agreed on it.
#pragma once

#include <vector>

#include "dispatch/buffer/quantized_buffer.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard {

/// Buffers that requantize together: of one device, and of groups that are these or fewer.
struct Batch {
  at::Device device;
  Groups groups;  // `replicas` where they see other activations
  std::vector<BufferPtr> buffers;
};

/// Positions of buffers whose scale groups are there with all members, group by group.
std::vector<std::vector<size_t>> shared_scales(const std::vector<BufferPtr>& buffers);

struct RequantizeOptions {
  FlushKind kind = FlushKind::kOutsideStep;
  at::Tensor found_inf = {};
  /// kKeep: a flush of all ranks is to follow, so the state stays as it was, too.
  QuantizedBuffer::Pending pending = QuantizedBuffer::Pending::kDrop;
  at::Tensor* amax = nullptr;  // takes the agreed amaxes of all buffers, one after the other
};

/// Requantizes a batch's buffers. Those whose codes are final only exchange amaxes. It writes
/// nothing before the ranks have agreed, so an error leaves every buffer as it was. The caller
/// marks the buffers: codes current, or scales synced.
/// @throws what the group's all-reduce throws: a peer that is gone, a timeout.
void requantize(const Batch& batch, const RequantizeOptions& options);

}  // namespace qshard
