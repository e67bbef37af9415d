// Which tile of which shard a CUDA block works on, and how its threads walk the tile.
#pragma once

#include <climits>

#include "kernels/device/task_batch.cuh"
#include "kernels/device/unaligned_vectors.cuh"
#include "kernels/quantize/grid_scaled/kernels.h"

namespace qshard::cuda {

/// Rows [row_begin, row_end) x columns [col_begin, col_begin + kTileCols) of a shard.
struct Tile {
  int row_begin;
  int row_end;
  int col_begin;
  int grid_index;  // entry of amax and grid; -1: rows outside the logical tensor
};

__host__ __device__ __forceinline__ int tile_count(const GridScaledTask& task) {
  const int other_rows = task.rows - task.live_rows;
  return (task.live_tile_rows + (other_rows + kTileRows - 1) / kTileRows) * task.tile_cols;
}

__device__ __forceinline__ Tile find_tile(const GridScaledTask& task, int block) {
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
  // 64-bit divisions would take longer than a thread's share of the tile.
  const auto logical_tile = static_cast<uint32_t>(task.first_tile_row + tile_row);
  const uint32_t matrix = logical_tile / static_cast<uint32_t>(task.tiles_per_matrix);
  const int64_t in_matrix =
      static_cast<int64_t>(logical_tile - matrix * task.tiles_per_matrix) * kTileRows;
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

/// The vectors of a tile that are one thread's: those at column `col` of every kRowStride-th row.
template <typename Value>
struct ThreadRows {
  static constexpr int kVectorsPerRow = kTileCols / Vector<Value>::kSize;
  static constexpr int kRowStride = kThreads / kVectorsPerRow;
  static constexpr int kRows = kTileRows / kRowStride;
  int col;
  int first_row;

  __device__ explicit ThreadRows(const Tile& tile)
      : col(tile.col_begin + static_cast<int>(threadIdx.x) % kVectorsPerRow * Vector<Value>::kSize),
        first_row(tile.row_begin + static_cast<int>(threadIdx.x) / kVectorsPerRow) {}
  __device__ int row(int i) const { return first_row + i * kRowStride; }

  /// Whether no other thread has an earlier column of its rows.
  __device__ static bool is_first() { return threadIdx.x % kVectorsPerRow == 0; }
  /// The largest of the bits of the threads that have the same rows, for all of them. All lanes of
  /// a warp take part.
  __device__ static uint32_t max_of_row(uint32_t bits) {
#pragma unroll
    for (int lane = kVectorsPerRow / 2; lane > 0; lane /= 2) {
      bits = max(bits, __shfl_xor_sync(kWholeWarp, bits, lane));
    }
    return bits;
  }
};

/// Which entry of amax and grid a live row has, where each has one: that of its row of the logical
/// tensor, whose matrices lie one after the other.
__device__ __forceinline__ int64_t entry_of_row(const GridScaledTask& task, int row) {
  return task.row_offset + row;
}

/// Reads the thread's vectors [begin, begin + kCount), zeros where the tile has no value: all loads
/// before anything waits for one.
template <typename Value, int kCount>
__device__ __forceinline__ void load_vectors(const GridScaledTask& task, const Tile& tile,
                                             const ThreadRows<Value>& rows, int begin,
                                             Vector<Value> (&x)[kCount]) {
  const auto* values = static_cast<const typename Value::Raw*>(task.values) + rows.col;
  const int row_end = rows.col < task.cols ? tile.row_end : INT_MIN;
  const auto load = [&](const auto& load_one) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = rows.row(begin + i);
      x[i] = {};
      if (row < row_end) x[i] = load_one(values + static_cast<int64_t>(row) * task.cols);
    }
  };
  const int count = task.cols - rows.col;
  const auto at = [&](int row) { return values + static_cast<int64_t>(row) * task.cols; };
  if (task.vectorized) {
    load([](const auto* from) { return load_vector<Value>(from); });
  } else if (can_load_shifted(task.values, task.rows, task.cols, at(rows.row(begin)),
                              at(min(rows.row(begin + kCount - 1), tile.row_end - 1)))) {
    load([&](const auto* from) { return load_shifted<Value>(from, count); });
  } else {
    load([&](const auto* from) { return load_some<Value>(from, count); });
  }
}

/// Zeros the image where the tile is, one of rows outside the logical tensor.
__device__ __forceinline__ void write_zeros(const GridScaledTask& task, const Tile& tile) {
  for_each_group<16>(tile, task.row_bytes, [&](int row, int col) {
    *reinterpret_cast<uint4*>(task.image + static_cast<int64_t>(row) * task.row_bytes + col) =
        make_uint4(0, 0, 0, 0);
  });
}

}  // namespace qshard::cuda
