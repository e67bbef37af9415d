// Launches of the grouped GEMM by the height of its tiles.
#pragma once

#include <algorithm>

#include "kernels/format/layout.h"
#include "kernels/grouped/gemm_sm90.cuh"

namespace qshard::cuda {

template <GroupsAlong kAlong, ColumnScales kScales, int kRows, bool kWideA>
cudaError_t launch(const GroupedGemmArguments& arguments, cudaStream_t stream) {
  const auto kernel = grouped_gemm<kAlong, kScales, kRows, kWideA>;
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (error != cudaSuccess) return error;
  const int64_t rows = kAlong == GroupsAlong::kRows
                           ? ceil_div(arguments.total, kRows) + arguments.groups + 1
                           : ceil_div(arguments.m, kRows) * arguments.groups;
  const int64_t most = rows * ceil_div(arguments.n, columns_of_tile(kRows));
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(multiprocessors, most));
  kernel<<<blocks, kGroupedThreads, kSharedBytes, stream>>>(arguments);
  return cudaGetLastError();
}

template <GroupsAlong kAlong, ColumnScales kScales, bool kWideA = false>
cudaError_t launch_rows(const GroupedGemmArguments& arguments, int tile_rows, cudaStream_t stream) {
  switch (tile_rows) {
    case 64:
      return launch<kAlong, kScales, 64, kWideA>(arguments, stream);
    case 128:
      return launch<kAlong, kScales, 128, kWideA>(arguments, stream);
    case 256:
      return launch<kAlong, kScales, 256, kWideA>(arguments, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace qshard::cuda
