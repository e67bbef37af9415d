// The two row images of mxfp8_1x32, or the columnwise one alone, from one read of the values.
//
// Tiles, and the CUDA blocks after them, are those of quantize_row_scaled.cu; a tile is one block
// row of the columnwise image.
#include "kernels/quantize/columnwise/kernels.h"
#include "kernels/quantize/row_scaled/quantize.cuh"

namespace qshard::cuda {
namespace {

constexpr int kBlockSize = 32;  // values with one scale, in a row or in a column
static_assert(kCodeTileRows == kBlockSize && kColumnRows == kBlockSize);

/// What the warps tell each other about a tile: the blocks' amaxes, then their scales.
template <typename Value>
struct SharedScales {
  using Row = TileRow<Value, kBlockSize>;
  static constexpr int kColumnWords = Row::kCols / Value::kPerWord;

  uint32_t row_amax[kCodeTileRows * Row::kScales];
  uint4 column_amax[kRowScaledWarps][32];  // magnitudes as they lie in a lane's vectors
  float row_encode[kCodeTileRows * Row::kScales];
  float4 column_encode[Row::kCols / 4];
  Bytes<Row::kScales> row_scale_bytes[kCodeTileRows];
};

/// Leaves a warp's amaxes: of its rows' blocks, and of its part of the columns.
template <typename Value>
__device__ __forceinline__ void find_amaxes(const Vector<Value> (&x)[kRowsPerWarp],
                                            SharedScales<Value>& shared) {
  using Row = TileRow<Value, kBlockSize>;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint32_t column[4] = {};
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      column[w] = Value::max(column[w], Value::magnitudes(x[i].word[w]));
    }
    const uint32_t largest = max_over_lanes<Row::kLanes>(largest_of<Value, 1>(x + i));
    if (lane % Row::kLanes == 0) {
      shared.row_amax[(warp * kRowsPerWarp + i) * Row::kScales + lane / Row::kLanes] = largest;
    }
  }
  shared.column_amax[warp][lane] = make_uint4(column[0], column[1], column[2], column[3]);
}

/// Turns the amaxes of the rows' blocks into scales.
template <typename Value>
__device__ __forceinline__ void find_row_scales(SharedScales<Value>& shared) {
  constexpr int kBlocks = sizeof(shared.row_amax) / sizeof(uint32_t);
  static_assert(kBlocks % kRowScaledThreads == 0);
#pragma unroll
  for (int step = 0; step < kBlocks; step += kRowScaledThreads) {
    const int i = step + static_cast<int>(threadIdx.x);
    const BlockScale scale = block_scale(RowScale::kE8M0, __uint_as_float(shared.row_amax[i]), 1.f);
    shared.row_encode[i] = scale.encode;
    reinterpret_cast<uint8_t*>(shared.row_scale_bytes)[i] = scale.byte;
  }
}

/// Turns the amaxes of the columns, or what ranks agreed on, into scales, and writes their bytes to
/// `image`, the columnwise one at the tile's first row.
template <typename Value>
__device__ __forceinline__ void find_column_scales(const RowScaledTask& task,
                                                   const RowScaledTile& tile, uint8_t* image,
                                                   SharedScales<Value>& shared) {
  constexpr int kWords = SharedScales<Value>::kColumnWords;
  static_assert(kWords == kRowScaledThreads, "a word each");
  const int thread = static_cast<int>(threadIdx.x);
  uint32_t largest = 0;
#pragma unroll
  for (int warp = 0; warp < kRowScaledWarps; ++warp) {
    largest = Value::max(
        largest, reinterpret_cast<const uint32_t*>(shared.column_amax)[warp * kWords + thread]);
  }
  const int entry = boundary_entry(task, tile.row_begin);
  const int in_tile = thread * Value::kPerWord;
  int col = tile.tile_col * TileRow<Value, kBlockSize>::kCols + in_tile;
  // A row holds as many scales of columns as of its own blocks, a slice. The scales past the last
  // column, 0 as their amaxes are, fill the last slice.
  const auto slice_bytes = static_cast<uint32_t>(task.block_cols);
  int slice = static_cast<int>(static_cast<uint32_t>(col) / slice_bytes);
  int in_slice = col - slice * task.block_cols;
#pragma unroll
  for (int k = 0; k < Value::kPerWord; ++k, ++col, ++in_slice) {
    float amax = __uint_as_float(Value::amax_bits(largest, k));
    if (entry >= 0 && col < task.cols) amax = __ldg(task.amax + entry + col);
    const BlockScale scale = block_scale(RowScale::kE8M0, amax, 1.f);
    reinterpret_cast<float*>(shared.column_encode)[in_tile + k] = scale.encode;
    if (in_slice == task.block_cols) {
      ++slice;
      in_slice = 0;
    }
    const int holder = tile.origin + slice;
    if (holder >= tile.row_begin && holder < tile.row_end) {
      image[static_cast<int64_t>(slice) * task.row_bytes + task.row_scale_offset + in_slice] =
          scale.byte;
    }
  }
}

/// Zeros after the scales of each row of the columnwise image, four threads to a row.
__device__ __forceinline__ void pad_rows(const RowScaledTask& task, const RowScaledTile& tile,
                                         uint8_t* image) {
  static_assert(kRowScaledThreads == 4 * kCodeTileRows);
  const int i = static_cast<int>(threadIdx.x / 4);
  const int row = tile.origin + i;
  if (row < tile.row_begin || row >= tile.row_end) return;
  uint8_t* bytes = image + static_cast<int64_t>(i) * task.row_bytes;
#pragma unroll 1
  for (int at = task.row_scale_offset + task.block_cols + static_cast<int>(threadIdx.x % 4);
       at < task.image_row_bytes; at += 4) {
    bytes[at] = 0;
  }
}

template <typename Value, typename Batch>
__global__ void __launch_bounds__(kRowScaledThreads) quantize(const __grid_constant__ Batch batch) {
  using Row = TileRow<Value, kBlockSize>;
  using Task = std::remove_cvref_t<decltype(batch.tasks[0])>;
  constexpr int kSize = Row::kSize;
  __shared__ SharedScales<Value> shared;
  int block = static_cast<int>(blockIdx.x);
  const Task& task = find_task(batch, block);
  const int tiles = tile_count(task);
  if (block >= tiles) {
    write_rest(task, block - tiles);
    return;
  }
  const RowScaledTile tile = find_tile<kCodeTileRows>(task, block);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int col = tile.tile_col * Row::kCols + lane * kSize;
  const int first_row = tile.origin + warp * kRowsPerWarp;
  Vector<Value> x[kRowsPerWarp];
  load_rows(task, tile, first_row, col, x);

  find_amaxes(x, shared);
  __syncthreads();
  const int to_columnwise = task.row_bytes - task.image_row_bytes;
  uint8_t* columnwise =
      task.image + static_cast<int64_t>(tile.origin) * task.row_bytes + to_columnwise;
  find_row_scales(shared);
  find_column_scales(task, tile, columnwise, shared);
  if (tile.tile_col == 0) pad_rows(task, tile, columnwise);
  __syncthreads();

  ScaleOfEach<Value> column_scale;
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    const float4 four = shared.column_encode[(lane * kSize + i) / 4];
    column_scale.scale[i] = four.x;
    column_scale.scale[i + 1] = four.y;
    column_scale.scale[i + 2] = four.z;
    column_scale.scale[i + 3] = four.w;
  }
  uint8_t* image = task.image + static_cast<int64_t>(first_row) * task.row_bytes;
  const int row_end = col < task.row_scale_offset ? tile.row_end : INT_MIN;
  // A columnwise image alone takes the place of what is stored first.
  uint8_t* codes = image + col;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i, codes += task.row_bytes) {
    const int row = first_row + i;
    if (row < tile.row_begin || row >= row_end) continue;
    const float row_scale =
        shared.row_encode[(warp * kRowsPerWarp + i) * Row::kScales + lane / Row::kLanes];
    if constexpr (std::is_same_v<Task, StochasticRowScaledTask>) {
      uint32_t words[kSize];
      RandomWords(task.rounding).get(task.element + row * task.element_pitch + col, words);
      store_bytes(codes, encode_vector_stochastic<E4M3>(x[i], row_scale, words));
      store_bytes(codes + to_columnwise, encode_vector_stochastic<E4M3>(x[i], column_scale, words));
    } else {
      store_bytes(codes, encode_vector<E4M3>(x[i], row_scale));
      store_bytes(codes + to_columnwise, encode_vector<E4M3>(x[i], column_scale));
    }
  }

  const int row = first_row + lane;
  if (to_columnwise > 0 && lane < kRowsPerWarp && row >= tile.row_begin && row < tile.row_end) {
    write_scales(task, tile.tile_col, image + static_cast<int64_t>(lane) * task.row_bytes,
                 shared.row_scale_bytes[warp * kRowsPerWarp + lane]);
  }
}

template <typename Batch>
cudaError_t launch(const Batch& batch, DType value_dtype, cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kRowScaledThreads>(quantize<decltype(value), Batch>, batch, stream);
  });
}

}  // namespace

cudaError_t launch_quantize_both_images(const RowScaledFlushBatch& batch, DType value_dtype,
                                        cudaStream_t stream) {
  return launch(batch, value_dtype, stream);
}

cudaError_t launch_quantize_both_images(const StochasticRowScaledBatch& batch, DType value_dtype,
                                        cudaStream_t stream) {
  return launch(batch, value_dtype, stream);
}

}  // namespace qshard::cuda
