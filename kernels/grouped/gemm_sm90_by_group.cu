#include "kernels/grouped/gemm_sm90.cuh"

namespace qshard::cuda {

cudaError_t launch_grouped_gemm_scaled_by_group(const GroupedGemmArguments& arguments,
                                                GroupsAlong along, bool wide_a, int tile_rows,
                                                cudaStream_t stream) {
  constexpr ColumnScales kGroup = ColumnScales::kGroup;
  if (along == GroupsAlong::kContraction) {
    return wide_a
               ? launch_rows<GroupsAlong::kContraction, kGroup, true>(arguments, tile_rows, stream)
               : cudaErrorInvalidValue;
  }
  return wide_a ? launch_rows<GroupsAlong::kRows, kGroup, true>(arguments, tile_rows, stream)
                : launch_rows<GroupsAlong::kRows, kGroup, false>(arguments, tile_rows, stream);
}

}  // namespace qshard::cuda
