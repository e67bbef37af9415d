// What GEMMs a device has goes by its compute capability.
#pragma once

#include <c10/core/Device.h>

namespace qshard::cuda {

/// 90 for 9.0; 0 for what is no CUDA device, and in builds without CUDA.
int compute_capability(at::Device device);

}  // namespace qshard::cuda
