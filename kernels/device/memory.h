// Memory of CUDA devices: torch's allocator, and copies on the device's current stream. The caller
// holds the device guard; nothing synchronises.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace qshard::cuda {

/// torch's caching allocator.
c10::Allocator* allocator();
void zero(void* memory, int64_t bytes, c10::Device device);
void copy(void* to, const void* from, int64_t bytes, c10::Device device);

}  // namespace qshard::cuda
