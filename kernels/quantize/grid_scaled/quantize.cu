// Row images from values, and grids of scale_inv, given the blocks' amaxes or finding them.
//
// Given the amaxes the first CUDA blocks of a task each write one tile of the image; the rest write
// the grid, which covers the whole logical tensor.
#include "kernels/device/amax.cuh"
#include "kernels/device/stochastic_codes.cuh"
#include "kernels/quantize/grid_scaled/tile.cuh"

namespace qshard::cuda {
namespace {

template <typename Value>
__device__ __forceinline__ void encode_tile_stochastic(const StochasticGridScaledTask& task,
                                                       const Tile& tile, float scale) {
  constexpr int kSize = Vector<Value>::kSize;
  const auto* values = static_cast<const typename Value::Raw*>(task.values);
  const RandomWords random(task.rounding);
  // A vector's codes are one store, even where its values are not one load: rows of the image are
  // aligned.
  for_each_group<kSize>(tile, task.row_bytes, [&](int row, int col) {
    VectorBytes<E4M3, Value> codes = {};
    if (col < task.cols) {
      const auto* x = values + static_cast<int64_t>(row) * task.cols + col;
      uint32_t words[kSize];
      random.get(task.element + row * task.element_pitch + col, words);
      codes = encode_vector_stochastic<E4M3>(
          task.vectorized ? load_vector<Value>(x) : load_some<Value>(x, task.cols - col), scale,
          words);
    }
    store_bytes(task.image + static_cast<int64_t>(row) * task.row_bytes + col, codes);
  });
}

template <typename Value, typename Batch>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ Batch batch) {
  int block = static_cast<int>(blockIdx.x);
  const auto& task = find_task(batch, block);

  const int tiles = tile_count(task);
  if (block >= tiles) {
    const int i = (block - tiles) * kThreads + static_cast<int>(threadIdx.x);
    if (i < task.grid_numel) {
      const float scale = scale_from_amax(task.amax[i], task.code_max, task.power_of_two);
      write_scale_inv(task, i, inverse_scale(scale));
    }
    return;
  }

  const Tile tile = find_tile(task, block);
  if (tile.grid_index < 0) {
    write_zeros(task, tile);
    return;
  }
  const auto find_scale = [&] {
    return scale_from_amax(task.amax[tile.grid_index], task.code_max, task.power_of_two);
  };
  if (task.speculative_scale_inv != nullptr &&
      inverse_scale(find_scale()) == task.speculative_scale_inv[tile.grid_index]) {
    return;
  }
  if constexpr (std::is_same_v<Batch, StochasticGridScaledBatch>) {
    encode_tile_stochastic<Value>(task, tile, find_scale());
    return;
  }
  using Rows = ThreadRows<Value>;
  constexpr int kVectors = 8;  // in registers at a time
  const Rows rows(tile);
  if (rows.col >= task.row_bytes) return;
#pragma unroll 1
  for (int begin = 0; begin < Rows::kRows; begin += kVectors) {
    Vector<Value> x[kVectors];
    load_vectors(task, tile, rows, begin, x);
    const float scale = find_scale();  // while the values are under way
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int row = rows.row(begin + i);
      if (row >= tile.row_end) return;
      store_bytes(task.image + static_cast<int64_t>(row) * task.row_bytes + rows.col,
                  encode_vector<E4M3>(x[i], scale));
    }
  }
}

/// A tile's values stay in registers between finding their amax and encoding.
template <typename Value>
__global__ void __launch_bounds__(kThreads, 3)
    quantize_tiles(const __grid_constant__ GridScaledFlushBatch batch) {
  using Rows = ThreadRows<Value>;
  int block = static_cast<int>(blockIdx.x);
  const GridScaledTask& task = find_task(batch, block);
  const Tile tile = find_tile(task, block);
  if (tile.grid_index < 0) {
    write_zeros(task, tile);
    return;
  }
  const Rows rows(tile);
  Vector<Value> x[Rows::kRows];
  load_vectors(task, tile, rows, 0, x);
  const uint32_t largest = max_of_block<kThreads>(largest_of<Value, Rows::kRows>(x));
  const float amax = __uint_as_float(canonical_amax(largest));
  const float scale = scale_from_amax(amax, task.code_max, task.power_of_two);
  if (threadIdx.x == 0) {
    task.amax[tile.grid_index] = amax;
    write_scale_inv(task, tile.grid_index, inverse_scale(scale));
  }
  if (rows.col >= task.row_bytes) return;
#pragma unroll
  for (int i = 0; i < Rows::kRows; ++i) {
    const int row = rows.row(i);
    if (row >= tile.row_end) return;
    store_bytes(task.image + static_cast<int64_t>(row) * task.row_bytes + rows.col,
                encode_vector<E4M3>(x[i], scale));
  }
}

template <typename Batch>
cudaError_t launch(const Batch& batch, DType value_dtype, cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kThreads>(quantize<decltype(value), Batch>, batch, stream);
  });
}

}  // namespace

int quantize_blocks(const GridScaledTask& task) {
  return tile_count(task) + (task.grid_numel + kThreads - 1) / kThreads;
}

int quantize_tiles_blocks(const GridScaledTask& task) { return tile_count(task); }

cudaError_t launch_quantize_tiles(const GridScaledFlushBatch& batch, DType value_dtype,
                                  cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kThreads>(quantize_tiles<decltype(value)>, batch, stream);
  });
}

cudaError_t launch_quantize(const GridScaledFlushBatch& batch, DType value_dtype,
                            cudaStream_t stream) {
  return launch(batch, value_dtype, stream);
}

cudaError_t launch_quantize(const StochasticGridScaledBatch& batch, DType value_dtype,
                            cudaStream_t stream) {
  return launch(batch, value_dtype, stream);
}

}  // namespace qshard::cuda
