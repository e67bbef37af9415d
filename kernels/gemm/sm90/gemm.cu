#include "kernels/gemm/sm90/gemm.cuh"

namespace qshard::cuda {

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
