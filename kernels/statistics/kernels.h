// CUDA side of kernels/statistics/statistics.h. Sizes are not zero.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/statistics/tally.h"

namespace qshard::cuda {

cudaError_t launch_add_statistics(const CodedMatrix& matrix, int64_t* tally, cudaStream_t stream);

}  // namespace qshard::cuda
