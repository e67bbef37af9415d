#include "kernels/gemm/sm90/gemm.cuh"

namespace qshard::cuda {
namespace {

template <GroupsAlong kAlong>
cudaError_t launch_along(const GroupedGemmArguments& arguments, bool wide_a, int tile_rows,
                         cudaStream_t stream) {
  constexpr ColumnScales kGroup = ColumnScales::kGroup;
  if (arguments.has_vectors()) {
    return wide_a ? cudaErrorInvalidValue
                  : launch_rows<kAlong, ColumnScales::kVector>(arguments, tile_rows, stream);
  }
  return wide_a ? launch_rows<kAlong, kGroup, true>(arguments, tile_rows, stream)
                : launch_rows<kAlong, kGroup>(arguments, tile_rows, stream);
}

}  // namespace

cudaError_t launch_grouped_gemm_scaled_by_group(const GroupedGemmArguments& arguments,
                                                GroupsAlong along, bool wide_a, int tile_rows,
                                                cudaStream_t stream) {
  return along == GroupsAlong::kContraction
             ? launch_along<GroupsAlong::kContraction>(arguments, wide_a, tile_rows, stream)
             : launch_along<GroupsAlong::kRows>(arguments, wide_a, tile_rows, stream);
}

}  // namespace qshard::cuda
