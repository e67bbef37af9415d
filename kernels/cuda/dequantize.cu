// Values from row images and grids.
#include "kernels/cuda/row_image_tile.cuh"

namespace qshard::cuda {
namespace {

template <typename Value>
__global__ void __launch_bounds__(kThreads)
    dequantize(const __grid_constant__ RowImageBatch batch) {
  using Raw = typename Value::Raw;
  constexpr int kSize = Vector<Value>::kSize;
  int block = static_cast<int>(blockIdx.x);
  const RowImageTask& task = find_task(batch, block);
  const Tile tile = find_tile(task, block);
  const bool live = tile.grid_index >= 0;
  const float scale_inv = live ? task.grid[tile.grid_index] : 0.f;
  Raw* values = static_cast<Raw*>(task.values);
  if (task.vectorized) {
    for_each_group<kSize>(tile, task.cols, [&](int row, int col) {
      uint32_t codes[kSize / 4] = {};
      if (live) {
        memcpy(codes,
               __builtin_assume_aligned(
                   task.image + static_cast<int64_t>(row) * task.row_bytes + col, kSize),
               kSize);
      }
      store_vector<Value>(values + static_cast<int64_t>(row) * task.cols + col, [&](int i) {
        return Value::store(decode_e4m3_scaled((codes[i / 4] >> (8 * (i % 4))) & 0xffu, scale_inv));
      });
    });
  } else {
    for_each_group<1>(tile, task.cols, [&](int row, int col) {
      Raw raw = 0;
      if (live) {
        const uint8_t code = task.image[static_cast<int64_t>(row) * task.row_bytes + col];
        raw = Value::store(decode_e4m3_scaled(code, scale_inv));
      }
      values[static_cast<int64_t>(row) * task.cols + col] = raw;
    });
  }
}

}  // namespace

int dequantize_blocks(const RowImageTask& task) { return tile_count(task); }

cudaError_t launch_dequantize(const RowImageBatch& batch, DType value_dtype, cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kThreads>(dequantize<decltype(value)>, batch, stream);
  });
}

}  // namespace qshard::cuda
