// Values from row images and grids.
#include "kernels/device/vector_codes.cuh"
#include "kernels/quantize/grid_scaled/tile.cuh"

namespace qshard::cuda {
namespace {

template <typename Value>
__global__ void __launch_bounds__(kThreads)
    dequantize(const __grid_constant__ GridScaledBatch batch) {
  using Raw = typename Value::Raw;
  using Codes = VectorBytes<E4M3, Value>;
  using Rows = ThreadRows<Value>;
  int block = static_cast<int>(blockIdx.x);
  const GridScaledTask& task = find_task(batch, block);
  const Tile tile = find_tile(task, block);
  const Rows rows(tile);
  const bool vectorized = task.vectorized;
  if (vectorized && rows.col >= task.cols) return;
  const bool live = tile.grid_index >= 0;

  // All loads first: behind a store, which might alias, they would wait for one another.
  Codes codes[Rows::kRows];
  const uint8_t* image = task.image + rows.col;
#pragma unroll
  for (int i = 0; i < Rows::kRows; ++i) {
    codes[i] = {};
    if (live && rows.row(i) < tile.row_end && rows.col < task.cols) {
      const uint8_t* from = image + static_cast<int64_t>(rows.row(i)) * task.row_bytes;
      codes[i] = __ldg(reinterpret_cast<const Codes*>(from));
    }
  }
  const float scale_inv = live ? task.grid[tile.grid_index] : 0.f;
  const bool is_finite = (__float_as_uint(scale_inv) & kAbsMask) < kInfBits;
  const int cols = task.cols;
  Raw* values = static_cast<Raw*>(task.values) + rows.col;
#pragma unroll
  for (int i = 0; i < Rows::kRows; ++i) {
    const int row = rows.row(i);
    if (vectorized && row >= tile.row_end) break;
    const auto one = [&](int k) {
      const uint32_t code = (word_at(codes[i], k) >> (8 * (k % 4))) & 0xffu;
      return Value::store(decode_e4m3_scaled(code, scale_inv));
    };
    const uint4 x = is_finite && !has_nan<E4M3, Value>(codes[i])
                        ? decode_vector<E4M3, Value>(codes[i], scale_inv)
                        : assemble<Value>(one);
    Raw* out = values + static_cast<int64_t>(row) * cols;
    if (vectorized) {
      store_bytes(out, x);
    } else {
      store_unaligned<Value, Rows::kVectorsPerRow>(out, row < tile.row_end ? cols - rows.col : 0,
                                                   x);
    }
  }
}

}  // namespace

int dequantize_blocks(const GridScaledTask& task) { return tile_count(task); }

cudaError_t launch_dequantize(const GridScaledBatch& batch, DType value_dtype,
                              cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kThreads>(dequantize<decltype(value)>, batch, stream);
  });
}

}  // namespace qshard::cuda
