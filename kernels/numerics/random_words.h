// Which random word rounds which element: the same on every shard, mesh, device and thread.
//
// Element i of the full tensor (row * columns + column) takes word i % 4 of the output of Philox
// 4x32-10 for the counter (i / 4, low word first, in words 0 and 1; count in word 2; 0 in word 3).
// The key is the 64-bit number key_low | key_high << 31, its low word first: two non-negative int32
// give 62 bits.
#pragma once

#include "kernels/numerics/float8.h"

namespace qshard {

/// The key of QuantizeTask::rounding.
QSHARD_HOST_DEVICE uint64_t philox_key(const int32_t* rounding) {
  return static_cast<uint64_t>(rounding[0]) | static_cast<uint64_t>(rounding[1]) << 31;
}

/// Its count.
QSHARD_HOST_DEVICE uint32_t philox_count(const int32_t* rounding) {
  return static_cast<uint32_t>(rounding[2]);
}

}  // namespace qshard
