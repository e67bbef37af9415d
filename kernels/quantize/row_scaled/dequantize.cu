// Values from row images with row-local scales.
//
// The first CUDA blocks of a task each write one tile of values; the rest zero the rows outside the
// logical tensor.
#include "kernels/quantize/row_scaled/tile.cuh"

namespace qshard::cuda {
namespace {

__host__ __device__ __forceinline__ int64_t values_to_zero(const RowScaledTask& task) {
  return static_cast<int64_t>(task.rows - task.live_rows) * task.cols;
}

// Its blocks' scales span no rows here: each row is read with the scales that it holds.
template <typename Code, RowScale kRowScale, int kBlockCols, typename Value>
__global__ void __launch_bounds__(kRowScaledThreads)
    dequantize(const __grid_constant__ RowScaledBatch batch) {
  using Raw = typename Value::Raw;
  using Row = TileRow<Value, kBlockCols>;
  using Codes = VectorBytes<Code, Value>;
  int block = static_cast<int>(blockIdx.x);
  const RowScaledTask& task = find_task(batch, block);
  Raw* values = static_cast<Raw*>(task.values);
  const int tiles = tile_count(task);
  if (block >= tiles) {
    write_zeros(values + static_cast<int64_t>(task.live_rows) * task.cols, values_to_zero(task),
                block - tiles);
    return;
  }
  const RowScaledTile tile = find_tile<kCodeTileRows>(task, block);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int col = tile.tile_col * Row::kCols + lane * Row::kSize;
  const bool vectorized = task.vectorized;
  if (vectorized && col >= task.cols) return;
  const int first_row = tile.origin + warp * kRowsPerWarp;
  const uint8_t* image = task.image + static_cast<int64_t>(first_row) * task.row_bytes;
  const int code_byte = col / kCodesPerByte<Code>;
  const int scale_byte = task.row_scale_offset + (kBlockCols == 0 ? 0 : col / Row::kWidth);

  Codes codes[kRowsPerWarp];
  uint8_t scales[kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    codes[i] = {};
    scales[i] = 0;
    const int row = first_row + i;
    if (row < tile.row_begin || row >= tile.row_end || col >= task.cols) continue;
    const uint8_t* bytes = image + static_cast<int64_t>(i) * task.row_bytes;
    codes[i] = __ldg(reinterpret_cast<const Codes*>(bytes + code_byte));
    scales[i] = __ldg(bytes + scale_byte);
  }
  const int cols = task.cols;
  const float tensor_scale_inv =
      kRowScale == RowScale::kE4M3 ? __ldg(task.grid + tile.matrix) : 1.f;
  values += static_cast<int64_t>(first_row) * task.cols + col;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = first_row + i;
    const bool is_here = row >= tile.row_begin && row < tile.row_end;
    if (vectorized && !is_here) continue;
    const float scale_inv = block_scale_inv(kRowScale, scales[i], tensor_scale_inv);
    const uint4 x = scale_inv == scale_inv && !has_nan<Code, Value>(codes[i])
                        ? decode_vector<Code, Value>(codes[i], scale_inv)
                        : assemble<Value>([&](int k) {
                            return decode_one<Code, Value>(codes[i], k, scale_inv);
                          });
    Raw* out = values + static_cast<int64_t>(i) * cols;
    if (vectorized) {
      store_bytes(out, x);
    } else {
      store_unaligned<Value, 32>(out, is_here ? cols - col : 0, x);
    }
  }
}

}  // namespace

int dequantize_blocks(const RowScaledTask& task) {
  return tile_count(task) +
         static_cast<int>((values_to_zero(task) + kZerosPerBlock - 1) / kZerosPerBlock);
}

cudaError_t launch_dequantize(const RowScaledBatch& batch, const Format& format, DType value_dtype,
                              cudaStream_t stream) {
  return with_row_scaled_types(format, value_dtype, [&](auto kind, auto value) {
    using Kind = decltype(kind);
    return launch_batch<kRowScaledThreads>(
        dequantize<typename Kind::Code, Kind::kRowScale, Kind::kBlockCols, decltype(value)>, batch,
        stream);
  });
}

}  // namespace qshard::cuda
