// Columnwise row images: amaxes of boundary blocks, values from codes and scales.
//
// A CUDA block works on one tile: a block row, and a column for each thread, which keeps its 32
// values in registers. A warp reads and writes neighbouring columns of a row at once. The CUDA
// blocks after a task's tiles zero the rows outside the logical tensor.
#include "kernels/device/task_batch.cuh"
#include "kernels/device/value_types.cuh"
#include "kernels/numerics/row_scales.h"
#include "kernels/quantize/columnwise/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kZerosPerBlock = 8 * kColumnwiseThreads;

struct ColumnwiseTile {
  int origin;     // row of the block's first row: negative where the shard begins inside it
  int row_begin;  // rows [row_begin, row_end) are live
  int row_end;
  int col;  // of this thread
};

__host__ __device__ __forceinline__ int tile_count(const ColumnwiseTask& task) {
  return task.block_rows * task.tile_cols;
}

__device__ __forceinline__ ColumnwiseTile tile_of(const ColumnwiseTask& task, int block_row,
                                                  int tile_col) {
  ColumnwiseTile tile;
  tile.origin = block_row * kColumnRows - task.first_in_block;
  tile.row_begin = max(tile.origin, 0);
  tile.row_end = min(tile.origin + kColumnRows, task.live_rows);
  tile.col = tile_col * kColumnwiseThreads + static_cast<int>(threadIdx.x);
  return tile;
}

/// Amax entry, at column 0, of a block row; -1 where no other rank holds rows of it.
__device__ __forceinline__ int boundary_entry(const ColumnwiseTask& task, int block_row) {
  if (block_row == 0) return task.first_boundary;
  return block_row == task.block_rows - 1 ? task.last_boundary : -1;
}

/// This thread's values, zeros where there is none.
template <typename Raw>
__device__ __forceinline__ void load_column(const ColumnwiseTask& task, const ColumnwiseTile& tile,
                                            Raw (&x)[kColumnRows]) {
  const Raw* values = static_cast<const Raw*>(task.values) +
                      static_cast<int64_t>(tile.origin) * task.cols + tile.col;
#pragma unroll
  for (int i = 0; i < kColumnRows; ++i, values += task.cols) {
    const int row = tile.origin + i;
    const bool there = tile.col < task.cols && row >= tile.row_begin && row < tile.row_end;
    x[i] = there ? __ldg(values) : Raw{};
  }
}

/// The largest magnitude as fp32 bits.
template <typename Value>
__device__ __forceinline__ uint32_t largest_of(const typename Value::Raw (&x)[kColumnRows]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kColumnRows; ++i) largest = Value::max(largest, Value::magnitudes(x[i]));
  return Value::amax_bits(largest, 0);
}

template <typename Value>
__global__ void __launch_bounds__(kColumnwiseThreads)
    amax(const __grid_constant__ ColumnwiseFlushBatch batch) {
  int block = static_cast<int>(blockIdx.x);
  const ColumnwiseTask& task = find_task(batch, block);
  const int block_row = block < task.tile_cols ? 0 : task.block_rows - 1;
  const int entry = boundary_entry(task, block_row);
  const ColumnwiseTile tile = tile_of(task, block_row, block % task.tile_cols);
  if (entry < 0 || tile.col >= task.cols) return;
  typename Value::Raw x[kColumnRows];
  load_column(task, tile, x);
  task.amax[entry + tile.col] = __uint_as_float(canonical_amax(largest_of<Value>(x)));
}

template <typename Value>
__global__ void __launch_bounds__(kColumnwiseThreads)
    dequantize(const __grid_constant__ ColumnwiseBatch batch) {
  using Raw = typename Value::Raw;
  int block = static_cast<int>(blockIdx.x);
  const ColumnwiseTask& task = find_task(batch, block);
  Raw* values = static_cast<Raw*>(task.values);
  const int tiles = tile_count(task);
  if (block >= tiles) {
    const int64_t count = static_cast<int64_t>(task.rows) * task.cols;
    const int64_t first = static_cast<int64_t>(task.live_rows) * task.cols +
                          static_cast<int64_t>(block - tiles) * kZerosPerBlock;
    for (int64_t at = first + threadIdx.x; at < min(first + kZerosPerBlock, count);
         at += kColumnwiseThreads) {
      values[at] = Raw{};
    }
    return;
  }
  const ColumnwiseTile tile = tile_of(task, block / task.tile_cols, block % task.tile_cols);
  const int col = tile.col;
  if (col >= task.cols) return;
  // Rows of the block outside this window are there too.
  const uint8_t* image = task.image + static_cast<int64_t>(tile.origin) * task.row_bytes;
  const float scale_inv =
      e8m0_to_float(__ldg(image + static_cast<int64_t>(col / task.slice_bytes) * task.row_bytes +
                          task.row_scale_offset + col % task.slice_bytes));
  uint8_t codes[kColumnRows];
#pragma unroll
  for (int i = 0; i < kColumnRows; ++i) {
    const int row = tile.origin + i;
    if (row < tile.row_begin || row >= tile.row_end) continue;
    codes[i] = __ldg(image + static_cast<int64_t>(i) * task.row_bytes + col);
  }
#pragma unroll
  for (int i = 0; i < kColumnRows; ++i) {
    const int row = tile.origin + i;
    if (row < tile.row_begin || row >= tile.row_end) continue;
    // A NaN scale's values are one NaN, a NaN code's keeps its sign.
    values[static_cast<int64_t>(row) * task.cols + col] =
        Value::store(scale_inv == scale_inv ? decode_e4m3_scaled(codes[i], scale_inv) : scale_inv);
  }
}

int zero_blocks(int64_t count) {
  return static_cast<int>((count + kZerosPerBlock - 1) / kZerosPerBlock);
}

}  // namespace

int columnwise_amax_blocks(const ColumnwiseTask& task) {
  const bool none = task.block_rows == 0 || (task.first_boundary < 0 && task.last_boundary < 0);
  return none ? 0 : min(task.block_rows, 2) * task.tile_cols;
}

int columnwise_dequantize_blocks(const ColumnwiseTask& task) {
  return tile_count(task) +
         zero_blocks(static_cast<int64_t>(task.rows - task.live_rows) * task.cols);
}

cudaError_t launch_columnwise_amax(const ColumnwiseFlushBatch& batch, DType value_dtype,
                                   cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kColumnwiseThreads>(amax<decltype(value)>, batch, stream);
  });
}

cudaError_t launch_columnwise_dequantize(const ColumnwiseBatch& batch, DType value_dtype,
                                         cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kColumnwiseThreads>(dequantize<decltype(value)>, batch, stream);
  });
}

}  // namespace qshard::cuda
