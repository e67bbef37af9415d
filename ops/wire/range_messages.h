// What ranks send in FSDP1's all-gather of a flat parameter whose weights are sent as codes.
//
// Each rank has an equal shard of the flat parameter. Its message begins with the shard's values,
// in the dtype of forward and backward, but for the weights that are sent as codes. Those codes
// follow at the next multiple of 16 bytes. All messages are as long as the longest. Weight i has a
// format and, in geometry[3i, 3i + 3), rows, columns and where it begins in the flat parameter;
// `amax[i]` is what the whole of it is scaled by.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace qshard {

/// The message of `rank` of `world` ranks, uint8, for its `shard`, which is plain, contiguous and
/// of any floating-point dtype that can be quantized, or float64. A shard on meta needs no `amax`,
/// and its message shows the size.
/// @throws c10::ValueError for weights that overlap, are not in order or exceed the flat parameter,
/// and what ranges_of() refuses; c10::TypeError for other shards.
at::Tensor write_message(const at::Tensor& shard, int64_t rank, int64_t world,
                         const std::vector<std::string>& formats, at::IntArrayRef geometry,
                         at::TensorList amax, at::ScalarType dtype);
/// Writes the whole flat parameter, in the dtype of `out`, that messages (world, bytes) have.
/// @throws as write_message, before anything is written.
void read_messages(const at::Tensor& messages, const std::vector<std::string>& formats,
                   at::IntArrayRef geometry, at::TensorList amax, const at::Tensor& out);

}  // namespace qshard
