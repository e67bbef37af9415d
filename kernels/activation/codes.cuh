// Encodes a tile of values in registers: with one scale, in blocks of 1x128, or in the one 128x128
// block that the tile is.
#pragma once

#include "kernels/activation/tile.cuh"
#include "kernels/device/amax.cuh"

namespace qshard::cuda {

/// The scale of codes with one scale, for the GEMM: one thread of the grid.
__device__ __forceinline__ void store_tensor_scale(const ActivationTask& task, float scale) {
  if (task.codes != nullptr) *task.scale_inv = inverse_scale(scale);
  if (task.codes_t != nullptr) *task.scale_inv_t = inverse_scale(scale);
}

/// Whether fp32 bits of a magnitude are a NaN's.
__device__ __forceinline__ bool is_nan(uint32_t amax) { return amax > kInfBits; }

/// scale_inv of a block of 128x128 transposed codes, the `block`-th along their rows. The last one
/// fills what cuBLASLt pads a row of blocks by.
__device__ __forceinline__ void store_square_scale(const ActivationTask& task, int64_t block,
                                                   int64_t row_of_blocks, float scale_inv) {
  if (threadIdx.x >= 4) return;
  const int64_t blocks = task.m_padded_t / kTile;
  const int64_t pitch = (blocks + 3) / 4 * 4;
  const int64_t at = block + threadIdx.x;
  if (threadIdx.x == 0 || (block + 1 == blocks && at < pitch)) {
    task.scale_inv_t[row_of_blocks * pitch + at] = threadIdx.x == 0 ? scale_inv : 0.f;
  }
}

/// E4M3 codes of the transposed tile by one scale, which is the tile's.
template <typename Value, int kThreads>
__device__ __forceinline__ void store_square_columns(
    const ActivationTile<Value, kThreads>& tile, const ActivationTask& task, int64_t tile_row,
    int64_t tile_col, typename ActivationTile<Value, kThreads>::Shared& shared) {
  constexpr int kRows = ActivationTile<Value, kThreads>::kRows;
  const uint32_t amax = max_of_block<kThreads>(largest_of<Value, kRows>(tile.values));
  const float scale = scale_from_amax(__uint_as_float(amax), kE4M3Max, task.power_of_two);
  store_square_scale(task, tile_row / kTile, tile_col / kTile, inverse_scale(scale));
  tile.template store_columns<E4M3>(task, tile_row, tile_col, shared, is_nan(amax),
                                    [&](int) { return scale; });
}

/// E4M3 codes of the tile's rows in blocks of 1x128.
template <typename Tile>
__device__ __forceinline__ void store_rows_1x128(const Tile& tile, const ActivationTask& task,
                                                 int64_t tile_row, int64_t tile_col) {
  uint32_t amax[Tile::kRows];
  tile.row_amax(amax);
  float scale[Tile::kRows];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    largest = max(largest, amax[i]);
    scale[i] = scale_from_amax(__uint_as_float(amax[i]), kE4M3Max, task.power_of_two);
    const int64_t r = tile_row + tile.row + i;
    if (tile.col == 0 && r < task.rows_written) {
      task.scale_inv[tile_col / kTile * task.m_padded + r] = inverse_scale(scale[i]);
    }
  }
  tile.template store_rows<E4M3>(task, tile_row, tile_col, is_nan(largest),
                                 [&](int i) { return scale[i]; });
}

/// Does the same for the columns: stores the transposed tile in 1x128 blocks.
template <typename Tile>
__device__ __forceinline__ void store_columns_1x128(const Tile& tile, const ActivationTask& task,
                                                    int64_t tile_row, int64_t tile_col,
                                                    typename Tile::Shared& shared) {
  const bool has_nan = is_nan(tile.column_amax(shared));
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
  tile.template store_columns<E4M3>(task, tile_row, tile_col, shared, has_nan,
                                    [&](int j) { return shared.column_scale[tile.col + j]; });
}

/// Where a tile lies: its first row, and its first column in the transposed codes, which is another
/// one where groups of rows begin at multiples of 128 there.
struct TilePlace {
  int64_t row;
  int64_t column;
};

/// E4M3 codes in the orientations that the task has, and their scales along each one's rows.
template <typename Tile>
__device__ __forceinline__ void store_1x128(const Tile& tile, const ActivationTask& task,
                                            TilePlace place, int64_t tile_col,
                                            typename Tile::Shared& shared) {
  if (task.codes != nullptr) store_rows_1x128(tile, task, place.row, tile_col);
  if (task.codes_t != nullptr) store_columns_1x128(tile, task, place.column, tile_col, shared);
}

/// E4M3 codes in the orientations and blocks that the task has.
template <typename Tile>
__device__ __forceinline__ void store_in_blocks(const Tile& tile, const ActivationTask& task,
                                                TilePlace place, int64_t tile_col,
                                                typename Tile::Shared& shared) {
  if (!task.square_columns) {
    store_1x128(tile, task, place, tile_col, shared);
    return;
  }
  if (task.codes != nullptr) store_rows_1x128(tile, task, place.row, tile_col);
  if (task.codes_t != nullptr) store_square_columns(tile, task, place.column, tile_col, shared);
}

}  // namespace qshard::cuda
