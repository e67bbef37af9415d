// GatheredBuffer: the unsharded tensor over bytes that FSDP gathered.
#pragma once

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// Its image is memory of FSDP's, its grid a snapshot of the shard's. It keeps no master. Its axis
/// is whose value it has:
///
///   state     what holds                             what may follow
///   gathered  the value is the image, as the shards  a read; a write; a later gather into the same
///             have it                                bytes (regather)
///   written   a pending write has the value, and     a flush by this rank alone, which gives it a
///             ends with the gather                   grid of its own; a later gather
///   freed     FSDP freed the bytes (reshard)         a later gather; reads are an error
class GatheredBuffer final : public QuantizedBuffer {
 public:
  /// The bytes of one gather of a flushed buffer, and what they are to be read with, until of() or
  /// regather() ends it.
  static at::Tensor begin(QuantizedBuffer& shard, Images images);
  /// The unsharded tensor over gathered bytes (rows * row_bytes, uint8); ends the gather of
  /// `shard`.
  static Ptr of(QuantizedBuffer& shard, const at::Tensor& bytes, at::ScalarType dtype);
  /// Made by of().
  using QuantizedBuffer::QuantizedBuffer;

  /// A later gather of `shard` into this memory: new codes and scales, perhaps the other image.
  void regather(QuantizedBuffer& shard, const at::Tensor& bytes);
};

}  // namespace qshard
