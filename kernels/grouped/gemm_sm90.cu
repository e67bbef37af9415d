#include <algorithm>

#include "kernels/format/layout.h"
#include "kernels/grouped/gemm_sm90.cuh"

namespace qshard::cuda {
namespace {

template <GroupsAlong kAlong, ColumnScales kScales, int kRows>
cudaError_t launch(const GroupedGemmArguments& arguments, cudaStream_t stream) {
  const auto kernel = grouped_gemm<kAlong, kScales, kRows>;
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

template <GroupsAlong kAlong, ColumnScales kScales>
cudaError_t launch_rows(const GroupedGemmArguments& arguments, int tile_rows, cudaStream_t stream) {
  switch (tile_rows) {
    case 64:
      return launch<kAlong, kScales, 64>(arguments, stream);
    case 128:
      return launch<kAlong, kScales, 128>(arguments, stream);
    case 256:
      return launch<kAlong, kScales, 256>(arguments, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_grouped_gemm(const GroupedGemmArguments& arguments, GroupsAlong along,
                                ColumnScales scales, int tile_rows, cudaStream_t stream) {
  if (along == GroupsAlong::kRows) {
    return launch_rows<GroupsAlong::kRows, ColumnScales::kSquare>(arguments, tile_rows, stream);
  }
  return scales == ColumnScales::kSquare
             ? launch_rows<GroupsAlong::kContraction, ColumnScales::kSquare>(arguments, tile_rows,
                                                                             stream)
             : launch_rows<GroupsAlong::kContraction, ColumnScales::kRow>(arguments, tile_rows,
                                                                          stream);
}

}  // namespace qshard::cuda
