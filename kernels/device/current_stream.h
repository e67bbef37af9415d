// The stream that kernels run on, from torch's vocabulary.
#pragma once

#include <c10/core/Device.h>

#include "kernels/device/stream.h"

namespace qshard {

/// The calling thread's current stream on `device`.
Stream current_stream(at::Device device);

}  // namespace qshard
