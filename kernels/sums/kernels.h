// Launcher of the kernel that adds up rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/format/formats.h"

namespace qshard::cuda {

struct SumRowsTask {
  const void* rows = nullptr;       // (row_count, cols) contiguous
  const int64_t* places = nullptr;  // (place_count,)
  const int64_t* ends = nullptr;    // (sums,)
  void* out = nullptr;              // (sums, cols) contiguous
  int64_t row_count = 0;
  int64_t place_count = 0;
  int64_t sums = 0;
  int64_t cols = 0;
  bool vectorized = false;  // rows of both tensors are 16-byte aligned
};

cudaError_t launch_sum_rows(const SumRowsTask& task, DType dtype, cudaStream_t stream);

}  // namespace qshard::cuda
