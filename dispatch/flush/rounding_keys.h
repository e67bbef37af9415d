// Keys of stochastic rounding: one for each weight, the same on all ranks that hold rows of it.
#pragma once

#include <vector>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// Before the first step of weights that round stochastically: those that have one key, as layers
/// do that were quantized by calls of their own, in which they have one name, get others. The first
/// keeps it. The list is in the same order on all ranks, and so are the keys that come of it.
void tell_rounding_keys_apart(const std::vector<BufferPtr>& buffers);

}  // namespace qshard
