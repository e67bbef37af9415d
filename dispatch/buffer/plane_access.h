// PlaneAccess: the planes of a buffer as plain tensors that share its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// What public accessors show of a buffer, and what processes share of it. Such a tensor can be
/// written, so it either carries the counter that the buffer watches (watched), or the accessor
/// documents that it must not be.
class PlaneAccess {
 public:
  explicit PlaneAccess(QuantizedBuffer& buffer) : buffer_(buffer) {}

  at::Tensor image() const;
  /// The grid in the buffer's own memory; undefined where a format has none.
  at::Tensor grid() const;
  /// `[image | grid]` as flat bytes: of a copy where the buffer does not hold them so.
  at::Tensor code_bytes() const;
  /// These are undefined where there is none.
  at::Tensor master() const;
  at::Tensor pending() const;
  /// `plane`, a view of one of these, with the watched counter: in-place operators on it are
  /// noticed.
  at::Tensor watched(at::Tensor plane) const;

 private:
  QuantizedBuffer& buffer_;
};

}  // namespace qshard
