// Copies of buffers: whole, of rows, and into one.
#pragma once

#include <utility>
#include <vector>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

struct CopyTo {
  at::ScalarType dtype;
  at::Device device;
  bool non_blocking = false;
  bool pinned = false;
  bool keeps_adoption = false;  // else a copy is a tensor of its own until a gather, say, adopts it
};

/// All of it: padding rows and placement included, because FSDP2 hands copies of padded shards to
/// its hooks. A change of dtype rounds the master and keeps the codes, which were rounded from the
/// wider value: autocast casts the weight of F.linear this way, and its GEMM should not see values
/// rounded twice. Without a master, codes are the value in float32 alone: of another dtype the copy
/// waits for a flush of its values.
BufferPtr copy_buffer(QuantizedBuffer& buffer, const CopyTo& to);
inline BufferPtr copy_buffer(QuantizedBuffer& buffer) {
  return copy_buffer(buffer, {buffer.dtype(), buffer.device()});
}

/// Consecutive rows of one logical tensor, of one generation, as one.
BufferPtr concatenate(const std::vector<std::pair<BufferPtr, RowWindow>>& pieces);

/// Copies whole matrices into a tensor of its own, with the bytes of their codes, scales and master
/// and with their amax histories. `rows` is cut into runs of `run` rows, which hold whole matrices;
/// `index` (1-D, on the buffer's device) names the runs, the first one by 0.
/// @throws c10::Error for an index out of range, as at::index_select; on CUDA it stops the device.
BufferPtr copy_matrices(QuantizedBuffer& buffer, RowWindow rows, int64_t run,
                        const at::Tensor& index);

/// Rows of two contiguous planes of the same dtype and width.
void copy_rows(const at::Tensor& to, RowWindow to_rows, const ReadOnlyTensor& from,
               RowWindow from_rows, bool non_blocking);

/// `to` has the value and the image of `from`, perhaps in another dtype or of fewer rows.
void copy_flush_state(QuantizedBuffer& to, const QuantizedBuffer& from);

}  // namespace qshard
