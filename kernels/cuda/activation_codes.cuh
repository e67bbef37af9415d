// What becomes of a tile of values in registers: codes with one scale, or in blocks of 1x128.
#pragma once

#include "kernels/cuda/activation_tile.cuh"

namespace qshard::cuda {

/// The scale of codes with one scale, for the GEMM: one thread of the grid.
__device__ __forceinline__ void store_tensor_scale(const ActivationTask& task, float scale) {
  if (task.codes != nullptr) *task.scale_inv = inverse_scale(scale);
  if (task.codes_t != nullptr) *task.scale_inv_t = inverse_scale(scale);
}

/// Codes in the orientations that the task has, all by one scale. Whoever used `shared` before
/// synchronises.
template <typename Code, typename Tile>
__device__ __forceinline__ void store_tensorwise(const Tile& tile, const ActivationTask& task,
                                                 float scale, int64_t tile_row, int64_t tile_col,
                                                 typename Tile::Shared& shared) {
  const auto scale_of = [&](int) { return scale; };
  if (task.codes != nullptr) tile.template store_rows<Code>(task, tile_row, tile_col, scale_of);
  if (task.codes_t != nullptr) {
    tile.template store_columns<Code>(task, tile_row, tile_col, shared, scale_of);
  }
}

/// E4M3 codes in the orientations that the task has, and their scales along each one's rows.
template <typename Tile>
__device__ __forceinline__ void store_1x128(const Tile& tile, const ActivationTask& task,
                                            int64_t tile_row, int64_t tile_col,
                                            typename Tile::Shared& shared) {
  if (task.codes != nullptr) {
    uint32_t amax[Tile::kRows];
    tile.row_amax(amax);
    float scale[Tile::kRows];
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      scale[i] = scale_from_amax(__uint_as_float(amax[i]), kE4M3Max, task.power_of_two);
      const int64_t r = tile_row + tile.row + i;
      if (tile.col == 0 && r < task.m_padded) {
        task.scale_inv[tile_col / kTile * task.m_padded + r] = inverse_scale(scale[i]);
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
        task.scale_inv_t[tile_row / kTile * task.k_padded + c] = inverse_scale(scale);
      }
    }
    __syncthreads();
    tile.template store_columns<E4M3>(task, tile_row, tile_col, shared,
                                      [&](int j) { return shared.column_scale[tile.col + j]; });
  }
}

}  // namespace qshard::cuda
