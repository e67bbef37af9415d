// Flush: which buffers requantize, alone or by agreement of all ranks
// (dispatch/parts/flush_state.h).
#pragma once

#include <vector>

#include "dispatch/buffer/quantized_buffer.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard {

/// Makes the codes current for readers of image or grid (codes, GEMM, byte copies), or throws an
/// error that names `op` and the way out. It starts no collective: shards of whole blocks get the
/// exact codes of their rows, a shard without a group those of a tensor of its own, and both stay
/// written for the flush to come. All ranks of a group throw or none does, with or without rows: a
/// rank that went on alone would wait for the others in its next collective.
void ensure_codes_current(const BufferPtr& buffer, const char* op);

/// Makes the stale codes of a buffer current, without a collective.
/// @throws c10::Error if it cannot be flushed alone.
void flush_alone(const BufferPtr& buffer);

/// Flushes the written buffers, in the given order; the list must be the same on all ranks of each
/// buffer's group. `kind` and `found_inf` (undefined, or GradScaler's):
/// kernels/scaling/scaling_state.h.
void flush(const std::vector<BufferPtr>& buffers, FlushKind kind = FlushKind::kOutsideStep,
           const at::Tensor& found_inf = {});

/// As flush(), but first agrees on what is written on any rank: also right after a write that only
/// some ranks made.
void flush_any_written(const std::vector<BufferPtr>& buffers);

/// Compares, over the ranks that hold parts and replicas of each buffer's parameter, who counts it
/// as written: the diagnosis of a write that some ranks made and others did not, which the ranks
/// cannot know otherwise (qshard.debug). Changes nothing.
///
/// A collective over those ranks; the list must be the same on all of them. `is_written[i]` is what
/// this rank knows of buffers[i]; `rank` is this process's among the `world` of all processes.
/// Returns int32 on the CPU, (buffers, world): 2 where a rank counts the parameter as written, 1
/// where it does not, 0 for ranks that have no part in it.
at::Tensor written_by_rank(const std::vector<BufferPtr>& buffers,
                           const std::vector<bool>& is_written, int64_t rank, int64_t world);

}  // namespace qshard
