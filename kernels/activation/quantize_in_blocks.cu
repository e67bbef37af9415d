#include "kernels/activation/codes.cuh"

namespace qshard::cuda {
namespace {

template <typename Value>
__global__ void __launch_bounds__(kTileThreads)
    quantize_in_blocks(const __grid_constant__ ActivationTask task, bool vectorized) {
  using Tile = ActivationTile<Value>;
  __shared__ typename Tile::Shared shared;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  Tile tile;
  tile.load(task, tile_row, tile_col, vectorized);
  store_in_blocks(tile, task, {tile_row, tile_row}, tile_col, shared);
}

template <typename Value>
__global__ void __launch_bounds__(kTileThreads)
    quantize_groups_in_blocks(const __grid_constant__ ActivationTask task, const RowTile* tiles,
                              bool vectorized) {
  using Tile = ActivationTile<Value>;
  __shared__ typename Tile::Shared shared;
  const RowTile place = tiles[blockIdx.y];
  if (place.row < 0) return;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  ActivationTask group = task;
  group.m = place.end;
  group.rows_written = place.end;
  Tile tile;
  tile.load(group, place.row, tile_col, vectorized);
  store_in_blocks(tile, group, {place.row, place.column}, tile_col, shared);
}

}  // namespace

cudaError_t launch_quantize_groups_in_blocks(const ActivationTask& task, const RowTile* tiles,
                                             int64_t count, DType value_dtype,
                                             cudaStream_t stream) {
  if (task.m == 0 || task.k == 0 || count == 0) return cudaSuccess;
  const dim3 grid(activation_grid(task).x, static_cast<unsigned>(count));
  return with_value_type(value_dtype, [&](auto value) {
    quantize_groups_in_blocks<decltype(value)><<<grid, kTileThreads, 0, stream>>>(
        task, tiles, activation_is_vectorized(task, value_dtype));
    return cudaGetLastError();
  });
}

cudaError_t launch_quantize_activation_in_blocks(const ActivationTask& task, DType value_dtype,
                                                 cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  return with_value_type(value_dtype, [&](auto value) {
    quantize_in_blocks<decltype(value)><<<activation_grid(task), kTileThreads, 0, stream>>>(
        task, activation_is_vectorized(task, value_dtype));
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
