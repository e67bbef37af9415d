// Which tile of which shard a CUDA block works on, and how its warps read the tile.
#pragma once

#include <climits>

#include "kernels/device/amax.cuh"
#include "kernels/device/task_batch.cuh"
#include "kernels/device/unaligned_vectors.cuh"
#include "kernels/device/vector_codes.cuh"
#include "kernels/quantize/row_scaled/kernels.h"

namespace qshard::cuda {

/// How one format lies in a tile: a row of 32 vectors is a warp's. Blocks of 0 columns have all.
template <typename Value, int kBlockCols>
struct TileRow {
  static constexpr int kSize = Vector<Value>::kSize;
  static constexpr int kCols = 32 * kSize;
  static constexpr int kWidth = kBlockCols == 0 ? kCols : kBlockCols;
  static constexpr int kScales = kCols / kWidth;
  static constexpr int kLanes = kWidth / kSize;  // lanes that share a scale
};

constexpr int kRowScaledWarps = kRowScaledThreads / 32;
constexpr int kRowsPerWarp = kCodeTileRows / kRowScaledWarps;

struct RowScaledTile {
  int origin;     // row of the tile's first row: negative where the shard begins inside the tile
  int row_begin;  // rows [row_begin, row_end) are the shard's
  int row_end;
  int tile_col;
  int matrix;
};

__host__ __device__ __forceinline__ int tile_count(const RowScaledTask& task) {
  return task.live_tile_rows * task.tile_cols;
}

template <int kTileRows>
__host__ __device__ __forceinline__ RowScaledTile find_tile(const RowScaledTask& task, int block) {
  const uint32_t tile_row = static_cast<uint32_t>(block) / static_cast<uint32_t>(task.tile_cols);
  const uint32_t tile = static_cast<uint32_t>(task.first_tile) + tile_row;
  const uint32_t matrix = tile / static_cast<uint32_t>(task.tiles_per_matrix);
  const int in_matrix =
      static_cast<int>(tile - matrix * static_cast<uint32_t>(task.tiles_per_matrix)) * kTileRows;
  const int64_t origin =
      static_cast<int64_t>(matrix) * task.matrix_rows + task.matrix_begin + in_matrix;
  const int rows = min(kTileRows, task.matrix_rows - in_matrix);
  RowScaledTile found;
  found.origin = static_cast<int>(origin);
  found.row_begin = max(found.origin, 0);
  found.row_end = static_cast<int>(min(origin + rows, static_cast<int64_t>(task.live_rows)));
  found.tile_col = block - static_cast<int>(tile_row) * task.tile_cols;
  found.matrix = task.first_matrix + static_cast<int>(matrix);
  return found;
}

/// Amax entry, at column 0, of the block whose first row here is `row`; -1 where no other rank
/// holds rows of it.
__device__ __forceinline__ int boundary_entry(const RowScaledTask& task, int row) {
  if (row < task.first_boundary_end) return task.first_boundary;
  return row >= task.last_boundary_begin ? task.last_boundary : -1;
}

/// Reads this lane's vectors of the rows [first_row, first_row + kRows), zeros where the tile has
/// no value.
template <typename Value, int kRows>
__device__ __forceinline__ void load_rows(const RowScaledTask& task, const RowScaledTile& tile,
                                          int first_row, int col, Vector<Value> (&x)[kRows]) {
  const auto* values = static_cast<const typename Value::Raw*>(task.values) + col;
  const int row_end = col < task.cols ? tile.row_end : INT_MIN;
  const auto at = [&](int row) { return values + static_cast<int64_t>(row) * task.cols; };
  const auto load = [&](const auto& load_one) {
    const auto* from = at(first_row);
#pragma unroll
    for (int i = 0; i < kRows; ++i, from += task.cols) {
      x[i] = {};
      const int row = first_row + i;
      if (row >= tile.row_begin && row < row_end) x[i] = load_one(from);
    }
  };
  const int count = task.cols - col;
  if (task.vectorized) {
    load([](const auto* from) { return load_vector<Value>(from); });
  } else if (can_load_shifted(task.values, task.rows, task.cols, at(max(first_row, tile.row_begin)),
                              at(min(first_row + kRows, tile.row_end) - 1))) {
    load([&](const auto* from) { return load_shifted<Value>(from, count); });
  } else {
    load([&](const auto* from) { return load_some<Value>(from, count); });
  }
}

/// The maximum over groups of kLanes lanes.
template <int kLanes>
__device__ __forceinline__ uint32_t max_over_lanes(uint32_t bits) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    bits = max(bits, __shfl_xor_sync(kWholeWarp, bits, distance));
  }
  return bits;
}

/// Raises the amaxes of boundary blocks by `bits`, the largest of this lane's vectors of the rows
/// [first_row, first_row + kRowsPerWarp). They lie in one block row: a boundary block has 16 or 32
/// rows.
template <int kBlockCols, typename Value>
__device__ __forceinline__ void raise_boundary_amax(const RowScaledTask& task, int first_row,
                                                    int col, uint32_t bits) {
  constexpr int kLanes = TileRow<Value, kBlockCols>::kLanes;
  const int row = max(first_row, 0);
  const int entry = row < first_row + kRowsPerWarp ? boundary_entry(task, row) : -1;
  if (entry < 0) return;
  const uint32_t of_block = max_over_lanes<kLanes>(bits);
  if (threadIdx.x % kLanes == 0 && col < task.cols) {
    raise(task.amax + entry + col / kBlockCols, of_block);
  }
}

/// Raises the amax of the tile's matrix by `bits`, the largest of each thread.
__device__ __forceinline__ void raise_matrix_amax(const RowScaledTask& task,
                                                  const RowScaledTile& tile, uint32_t bits) {
  bits = max_of_block<kRowScaledThreads>(bits);
  if (threadIdx.x == 0) raise(task.amax + tile.matrix, bits);
}

/// Zeros in the words that CUDA block `block` has of `count`.
constexpr int kZerosPerThread = 8;
constexpr int kZerosPerBlock = kZerosPerThread * kRowScaledThreads;

template <typename Word>
__device__ __forceinline__ void write_zeros(Word* words, int64_t count, int block) {
  const int64_t first = static_cast<int64_t>(block) * kZerosPerBlock + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kZerosPerThread; ++i) {
    const int64_t at = first + i * kRowScaledThreads;
    if (at < count) words[at] = Word{};
  }
}

/// A format's types and block shape; `kFourOrSix` is Format::four_over_six.
template <typename CodeType, RowScale kScale, int kRows, int kCols, bool kFourOrSix = false>
struct RowScaledKind {
  using Code = CodeType;
  static constexpr RowScale kRowScale = kScale;
  static constexpr int kBlockRows = kRows;
  static constexpr int kBlockCols = kCols;
  static constexpr bool kFourOverSix = kFourOrSix;
};

/// Calls run(RowScaledKind{}, Value{}) with the types of `format` and `value_dtype`.
template <typename Run>
cudaError_t with_row_scaled_types(const Format& format, DType value_dtype, const Run& run) {
  const auto with_kind = [&](auto kind) {
    return with_value_type(value_dtype, [&](auto value) { return run(kind, value); });
  };
  const auto is = [&](DType code, DType scale, int64_t block_rows, int64_t block_cols) {
    return format.code_dtype == code && format.scale.dtype == scale &&
           format.scale.block_rows == block_rows && format.scale.block_cols == block_cols;
  };
  if (format.scale.as_fp32) {
    if (is(DType::kFloat8E4M3, DType::kFloat8E8M0, 1, 128)) {
      return with_kind(RowScaledKind<E4M3, RowScale::kE8M0AsFp32, 1, 128>{});
    }
    return is(DType::kFloat8E4M3, DType::kFloat8E8M0, 1, 0)
               ? with_kind(RowScaledKind<E4M3, RowScale::kE8M0AsFp32, 1, 0>{})
               : cudaErrorInvalidValue;
  }
  if (is(DType::kFloat8E4M3, DType::kFloat8E8M0, 32, 32)) {
    return with_kind(RowScaledKind<E4M3, RowScale::kE8M0, 32, 32>{});
  }
  if (is(DType::kFloat8E4M3, DType::kFloat8E8M0, 1, 32)) {
    return with_kind(RowScaledKind<E4M3, RowScale::kE8M0, 1, 32>{});
  }
  if (is(DType::kFloat4E2M1, DType::kFloat8E4M3, 16, 16)) {
    return with_kind(RowScaledKind<E2M1, RowScale::kE4M3, 16, 16>{});
  }
  if (is(DType::kFloat4E2M1, DType::kFloat8E4M3, 1, 16)) {
    return format.four_over_six ? with_kind(RowScaledKind<E2M1, RowScale::kE4M3, 1, 16, true>{})
                                : with_kind(RowScaledKind<E2M1, RowScale::kE4M3, 1, 16>{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace qshard::cuda
