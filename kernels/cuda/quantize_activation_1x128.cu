#include "kernels/cuda/activation_tile.cuh"

namespace qshard::cuda {
namespace {

template <typename Value>
__global__ void __launch_bounds__(kTileThreads)
    quantize_1x128(const __grid_constant__ ActivationTask task, bool vectorized) {
  using Tile = ActivationTile<Value>;
  __shared__ typename Tile::Shared shared;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  Tile tile;
  tile.load(task, tile_row, tile_col, vectorized);

  if (task.codes != nullptr) {
    uint32_t amax[Tile::kRows];
    tile.row_amax(amax);
    float scale[Tile::kRows];
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      scale[i] = scale_from_amax(__uint_as_float(amax[i]), kE4M3Max, task.power_of_two);
      const int64_t r = tile_row + tile.row + i;
      if (tile.col == 0 && r < task.m_padded) {
        task.scale_inv[blockIdx.x * task.m_padded + r] = inverse_scale(scale[i]);
      }
    }
    tile.template store_rows<E4M3>(task, tile_row, tile_col, [&](int i) { return scale[i]; });
  }

  if (task.codes_t != nullptr) {
    tile.column_amax(shared);
    __syncthreads();
    if (threadIdx.x < kTile) {
      const uint32_t amax = Tile::reduce_column_amax(shared, static_cast<int>(threadIdx.x));
      const float scale = scale_from_amax(__uint_as_float(amax), kE4M3Max, task.power_of_two);
      shared.column_scale[threadIdx.x] = scale;
      const int64_t c = tile_col + threadIdx.x;
      if (c < task.k_padded) {
        task.scale_inv_t[blockIdx.y * task.k_padded + c] = inverse_scale(scale);
      }
    }
    __syncthreads();
    tile.template store_columns<E4M3>(task, tile_row, tile_col, shared,
                                      [&](int j) { return shared.column_scale[tile.col + j]; });
  }
}

}  // namespace

cudaError_t launch_quantize_activation_1x128(const ActivationTask& task, DType value_dtype,
                                             cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  return with_value_type(value_dtype, [&](auto value) {
    quantize_1x128<decltype(value)><<<activation_grid(task), kTileThreads, 0, stream>>>(
        task, activation_is_vectorized(task, value_dtype));
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
