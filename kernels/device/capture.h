// Whether a CUDA graph is being captured, from torch's vocabulary.
#pragma once

#include <c10/core/Device.h>

namespace qshard {

/// Whether the device's current stream is being captured into a CUDA graph: nothing can be read
/// back.
bool is_capturing(at::Device device);

}  // namespace qshard
