// Row images and grids with one scale per row, which spans tiles: amaxes, codes, values. Rows
// outside the logical tensor have no entry of amax and grid.
#include "kernels/device/amax.cuh"
#include "kernels/device/stochastic_codes.cuh"
#include "kernels/quantize/grid_scaled/tile.cuh"

namespace qshard::cuda {
namespace {

template <typename Value, typename Batch>
__global__ void __launch_bounds__(kThreads) amax(const __grid_constant__ Batch batch) {
  using Rows = ThreadRows<Value>;
  constexpr int kVectors = 8;  // in registers at a time
  int block = static_cast<int>(blockIdx.x);
  const GridScaledTask& task = find_task(batch, block);
  const Tile tile = find_tile(task, block);
  const Rows rows(tile);
#pragma unroll 1
  for (int begin = 0; begin < Rows::kRows; begin += kVectors) {
    Vector<Value> x[kVectors];
    load_vectors(task, tile, rows, begin, x);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t largest = rows.max_of_row(largest_of<Value, 1>(x + i));
      const int row = rows.row(begin + i);
      if (rows.is_first() && row < tile.row_end)
        raise(task.amax + entry_of_row(task, row), largest);
    }
  }
}

template <typename Value, typename Batch>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ Batch batch) {
  constexpr bool kStochastic = std::is_same_v<Batch, StochasticGridScaledBatch>;
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
  const auto scale_of = [&](int row) {
    return scale_from_amax(task.amax[entry_of_row(task, row)], task.code_max, task.power_of_two);
  };
  if constexpr (kStochastic) {
    constexpr int kSize = Vector<Value>::kSize;
    const auto* values = static_cast<const typename Value::Raw*>(task.values);
    const RandomWords random(task.rounding);
    for_each_group<kSize>(tile, task.row_bytes, [&](int row, int col) {
      VectorBytes<E4M3, Value> codes = {};
      if (col < task.cols) {
        const auto* x = values + static_cast<int64_t>(row) * task.cols + col;
        uint32_t words[kSize];
        random.get(task.element + row * task.element_pitch + col, words);
        codes = encode_vector_stochastic<E4M3>(
            task.vectorized ? load_vector<Value>(x) : load_some<Value>(x, task.cols - col),
            scale_of(row), words);
      }
      store_bytes(task.image + static_cast<int64_t>(row) * task.row_bytes + col, codes);
    });
  } else {
    using Rows = ThreadRows<Value>;
    constexpr int kVectors = 8;  // in registers at a time
    const Rows rows(tile);
    if (rows.col >= task.row_bytes) return;
#pragma unroll 1
    for (int begin = 0; begin < Rows::kRows; begin += kVectors) {
      Vector<Value> x[kVectors];
      load_vectors(task, tile, rows, begin, x);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int row = rows.row(begin + i);
        if (row >= tile.row_end) return;
        const float scale = scale_of(row);
        const bool is_final =
            task.speculative_scale_inv != nullptr &&
            inverse_scale(scale) == task.speculative_scale_inv[entry_of_row(task, row)];
        if (is_final) continue;
        store_bytes(task.image + static_cast<int64_t>(row) * task.row_bytes + rows.col,
                    encode_vector<E4M3>(x[i], scale));
      }
    }
  }
}

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
  float scale_inv[Rows::kRows];
  const uint8_t* image = task.image + rows.col;
#pragma unroll
  for (int i = 0; i < Rows::kRows; ++i) {
    const int row = rows.row(i);
    codes[i] = {};
    scale_inv[i] = 0.f;
    if (live && row < tile.row_end && rows.col < task.cols) {
      const uint8_t* from = image + static_cast<int64_t>(row) * task.row_bytes;
      codes[i] = __ldg(reinterpret_cast<const Codes*>(from));
      scale_inv[i] = __ldg(task.grid + entry_of_row(task, row));
    }
  }
  const int cols = task.cols;
  Raw* values = static_cast<Raw*>(task.values) + rows.col;
#pragma unroll
  for (int i = 0; i < Rows::kRows; ++i) {
    const int row = rows.row(i);
    if (vectorized && row >= tile.row_end) break;
    const auto one = [&](int k) {
      const uint32_t code = (word_at(codes[i], k) >> (8 * (k % 4))) & 0xffu;
      return Value::store(decode_e4m3_scaled(code, scale_inv[i]));
    };
    const bool is_finite = (__float_as_uint(scale_inv[i]) & kAbsMask) < kInfBits;
    const uint4 x = is_finite && !has_nan<E4M3, Value>(codes[i])
                        ? decode_vector<E4M3, Value>(codes[i], scale_inv[i])
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

template <typename Batch>
cudaError_t launch_amax_of(const Batch& batch, DType value_dtype, cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kThreads>(amax<decltype(value), Batch>, batch, stream);
  });
}

template <typename Batch>
cudaError_t launch_quantize_of(const Batch& batch, DType value_dtype, cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kThreads>(quantize<decltype(value), Batch>, batch, stream);
  });
}

}  // namespace

cudaError_t launch_amax_in_rows(const GridScaledBatch& batch, DType value_dtype,
                                cudaStream_t stream) {
  return launch_amax_of(batch, value_dtype, stream);
}

cudaError_t launch_amax_in_rows(const GridScaledFlushBatch& batch, DType value_dtype,
                                cudaStream_t stream) {
  return launch_amax_of(batch, value_dtype, stream);
}

cudaError_t launch_quantize_in_rows(const GridScaledFlushBatch& batch, DType value_dtype,
                                    cudaStream_t stream) {
  return launch_quantize_of(batch, value_dtype, stream);
}

cudaError_t launch_quantize_in_rows(const StochasticGridScaledBatch& batch, DType value_dtype,
                                    cudaStream_t stream) {
  return launch_quantize_of(batch, value_dtype, stream);
}

cudaError_t launch_dequantize_in_rows(const GridScaledBatch& batch, DType value_dtype,
                                      cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kThreads>(dequantize<decltype(value)>, batch, stream);
  });
}

}  // namespace qshard::cuda
