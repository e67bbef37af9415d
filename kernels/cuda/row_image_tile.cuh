// Which tile of which shard a CUDA block works on, and how its threads walk the tile.
#pragma once

#include "kernels/cuda/row_image_kernels.h"
#include "kernels/cuda/task_batch.cuh"
#include "kernels/cuda/value_types.cuh"

namespace qshard::cuda {

/// Rows [row_begin, row_end) x columns [col_begin, col_begin + kTileCols) of a shard.
struct Tile {
  int row_begin;
  int row_end;
  int col_begin;
  int grid_index;  // entry of amax and grid; -1: rows outside the logical tensor
};

__host__ __device__ __forceinline__ int tile_count(const RowImageTask& task) {
  const int other_rows = task.rows - task.live_rows;
  return (task.live_tile_rows + (other_rows + kTileRows - 1) / kTileRows) * task.tile_cols;
}

__device__ __forceinline__ Tile find_tile(const RowImageTask& task, int block) {
  const int tile_row = block / task.tile_cols;
  const int tile_col = block % task.tile_cols;
  Tile tile;
  tile.col_begin = tile_col * kTileCols;
  if (tile_row >= task.live_tile_rows) {
    tile.row_begin = task.live_rows + (tile_row - task.live_tile_rows) * kTileRows;
    tile.row_end = min(tile.row_begin + kTileRows, task.rows);
    tile.grid_index = -1;
    return tile;
  }
  const int64_t logical_tile = task.first_tile_row + tile_row;
  const int64_t matrix = logical_tile / task.tiles_per_matrix;
  const int64_t in_matrix = logical_tile % task.tiles_per_matrix * kTileRows;
  const int64_t begin = matrix * task.matrix_rows + in_matrix - task.row_offset;
  const int64_t rows = min(static_cast<int64_t>(kTileRows), task.matrix_rows - in_matrix);
  tile.row_begin = static_cast<int>(max(begin, static_cast<int64_t>(0)));
  tile.row_end = static_cast<int>(min(begin + rows, static_cast<int64_t>(task.live_rows)));
  tile.grid_index = static_cast<int>(task.blockwise ? logical_tile * task.grid_cols + tile_col
                                                    : matrix * task.grid_cols);
  return tile;
}

/// Calls body(row, col) for the first column of every group of kWidth columns of the tile, rows in
/// passes of the whole CUDA block; consecutive threads take consecutive groups.
template <int kWidth, typename Body>
__device__ __forceinline__ void for_each_group(const Tile& tile, int col_end, const Body& body) {
  constexpr int kGroups = kTileCols / kWidth;
  constexpr int kRowsPerPass = kThreads / kGroups;
  const int col = tile.col_begin + static_cast<int>(threadIdx.x) % kGroups * kWidth;
  if (col >= col_end) return;
  const int row = tile.row_begin + static_cast<int>(threadIdx.x) / kGroups;
#pragma unroll 8
  for (int pass = 0; pass < kTileRows / kRowsPerPass; ++pass) {
    const int r = row + pass * kRowsPerPass;
    if (r < tile.row_end) body(r, col);
  }
}

}  // namespace qshard::cuda
