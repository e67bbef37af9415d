#include "kernels/gemm/sm90/gemm.cuh"

namespace qshard::cuda {

cudaError_t launch_transposing_grouped_gemm(const GroupedGemmArguments& arguments, bool by_group,
                                            bool wide_a, int tile_rows, cudaStream_t stream) {
  constexpr GroupsAlong kRows = GroupsAlong::kRows;
  constexpr ColumnScales kGroup = ColumnScales::kGroup;
  if (!by_group) {
    return launch_rows<kRows, ColumnScales::kSquare, false, true>(arguments, tile_rows, stream);
  }
  if (arguments.has_vectors()) {
    return wide_a ? cudaErrorInvalidValue
                  : launch_rows<kRows, ColumnScales::kVector, false, true>(arguments, tile_rows,
                                                                           stream);
  }
  return wide_a ? launch_rows<kRows, kGroup, true, true>(arguments, tile_rows, stream)
                : launch_rows<kRows, kGroup, false, true>(arguments, tile_rows, stream);
}

}  // namespace qshard::cuda
