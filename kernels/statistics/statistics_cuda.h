// kernels/statistics/statistics.h on CUDA: launches on a cudaStream_t.
#pragma once

#include "kernels/statistics/tally.h"

namespace qshard::cuda {

void add_statistics(const CodedMatrix& matrix, int64_t* tally, void* stream);

}  // namespace qshard::cuda
