// What a kernel launch returned.
#pragma once

#include <cuda_runtime_api.h>

namespace qshard::cuda {

/// @throws c10::Error naming the device and the rebuild command if the library has no code for it;
/// the CUDA error otherwise, as torch names it.
void check_launch(cudaError_t error);

}  // namespace qshard::cuda
