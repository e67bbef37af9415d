// What an original and its image-only copies know of each other (QuantizedBuffer::image_copy).
#pragma once

#include <optional>
#include <vector>

#include "dispatch/quantized_buffer.h"

namespace qshard {

/// Weak on both sides: a copy does not keep its original's master alive, nor an original its
/// copies.
struct QuantizedBuffer::ImageLinks {
  using WeakPtr = c10::weak_intrusive_ptr<QuantizedBuffer>;

  std::optional<WeakPtr> original;  // of a copy
  uint32_t original_writes = 0;     // when it was made
  std::vector<WeakPtr> copies;      // of an original
};

}  // namespace qshard
