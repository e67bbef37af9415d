// CUDA side of kernels/transpose/transpose.h. Sizes are checked and not zero.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/transpose/transpose.h"

namespace qshard::cuda {

cudaError_t launch_transpose_values(const TransposeTask& task, cudaStream_t stream);
cudaError_t launch_transpose_image(const TransposeImageTask& task, cudaStream_t stream);

}  // namespace qshard::cuda
