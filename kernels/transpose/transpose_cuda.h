// kernels/transpose/transpose.h on CUDA: launches on a cudaStream_t. Sizes are checked and not
// zero.
#pragma once

#include "kernels/transpose/transpose.h"

namespace qshard::cuda {

void transpose_values(const TransposeTask& task, void* stream);
void transpose_image(const TransposeImageTask& task, void* stream);

}  // namespace qshard::cuda
