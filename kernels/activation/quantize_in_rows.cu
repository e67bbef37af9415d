// Codes with one scale per row of either orientation: per token and per feature. A scale spans
// tiles, so one pass finds the amaxes and a second makes the codes: 2 + 2 B read of each 16-bit
// value, 1 B written for each orientation. The second pass finds in the L2 cache what the first has
// left there.
//
// The amaxes are collected where the scales will lie, which takes no other memory: they become
// scales once all codes are made.
#include "kernels/activation/codes.cuh"

namespace qshard::cuda {
namespace {

/// Values are multiplied by the factors of their columns, in fp32, then by the scale of their row.
template <typename Value>
struct FoldedScale {
  const float (&factors)[Vector<Value>::kSize];
  float scale;
};

/// What fp8_word() encodes (kernels/device/vector_codes.cuh).
template <typename Value>
__device__ __forceinline__ float scaled(const Vector<Value>& v, int i,
                                        const FoldedScale<Value>& by) {
  const float x = Value::load(v.word_of(i), i % Value::kPerWord);
  return __fmul_rn(__fmul_rn(x, by.factors[i]), by.scale);
}

/// The factors of a thread's columns; 0 beyond the matrix, where values are 0.
template <typename Value>
struct ColumnFactors {
  float of[Vector<Value>::kSize];

  __device__ __forceinline__ ColumnFactors(const ActivationTask& task, int64_t first) {
#pragma unroll
    for (int i = 0; i < Vector<Value>::kSize; ++i) {
      of[i] = first + i < task.k ? __ldg(task.column_factors + first + i) : 0.f;
    }
  }
};

/// fp32 bits of the largest magnitude of each of the thread's rows over the whole tile row, of
/// values times the factors of their columns.
template <typename Value>
__device__ __forceinline__ void folded_row_amax(const ActivationTile<Value>& tile,
                                                const ColumnFactors<Value>& factors,
                                                uint32_t (&amax)[ActivationTile<Value>::kRows]) {
#pragma unroll
  for (int i = 0; i < ActivationTile<Value>::kRows; ++i) {
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < Vector<Value>::kSize; ++j) {
      const float x = Value::load(tile.values[i].word_of(j), j % Value::kPerWord);
      largest = max(largest, __float_as_uint(__fmul_rn(x, factors.of[j])) & kAbsMask);
    }
#pragma unroll
    for (int lane = ActivationTile<Value>::kLanesPerRow / 2; lane > 0; lane /= 2) {
      largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, lane));
    }
    amax[i] = largest;
  }
}

template <typename Value, bool kFolded>
__global__ void __launch_bounds__(kTileThreads)
    row_amaxes(const __grid_constant__ ActivationTask task, bool vectorized) {
  using Tile = ActivationTile<Value>;
  __shared__ typename Tile::Shared shared;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  Tile tile;
  tile.load(task, tile_row, tile_col, vectorized);
  if (task.codes != nullptr) {
    uint32_t amax[Tile::kRows];
    if constexpr (kFolded) {
      folded_row_amax(tile, ColumnFactors<Value>(task, tile_col + tile.col), amax);
    } else {
      tile.row_amax(amax);
    }
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int64_t r = tile_row + tile.row + i;
      if (tile.col == 0 && r < task.m) raise(task.scale_inv + r, amax[i]);
    }
  }
  if (task.codes_t == nullptr) return;
  tile.column_amax(shared);
  __syncthreads();
  const int64_t c = tile_col + threadIdx.x;
  if (threadIdx.x < kTile && c < task.k) {
    raise(task.scale_inv_t + c, Tile::reduce_column_amax(shared, static_cast<int>(threadIdx.x)));
  }
}

template <typename Value, bool kFolded>
__global__ void __launch_bounds__(kTileThreads)
    quantize_in_rows(const __grid_constant__ ActivationTask task, bool vectorized) {
  using Tile = ActivationTile<Value>;
  __shared__ typename Tile::Shared shared;
  // From the end: that is what the amax pass has left in the L2 cache.
  const int64_t tile_row = static_cast<int64_t>(gridDim.y - 1 - blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  Tile tile;
  tile.load(task, tile_row, tile_col, vectorized);
  if (task.codes != nullptr) {
    float scale[Tile::kRows];
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int64_t r = tile_row + tile.row + i;
      const float amax = r < task.m ? task.scale_inv[r] : 0.f;
      has_nan |= isnan(amax);
      scale[i] = scale_from_amax(amax, kE4M3Max, task.power_of_two);
    }
    if constexpr (kFolded) {
      const ColumnFactors<Value> factors(task, tile_col + tile.col);
      tile.template store_rows<E4M3>(task, tile_row, tile_col, has_nan, [&](int i) {
        return FoldedScale<Value>{factors.of, scale[i]};
      });
    } else {
      tile.template store_rows<E4M3>(task, tile_row, tile_col, has_nan,
                                     [&](int i) { return scale[i]; });
    }
  }
  if (task.codes_t == nullptr) return;
  if (threadIdx.x < kTile) {
    const int64_t c = tile_col + threadIdx.x;
    const float amax = c < task.k ? task.scale_inv_t[c] : 0.f;
    shared.column_scale[threadIdx.x] = scale_from_amax(amax, kE4M3Max, task.power_of_two);
  }
  __syncthreads();
  tile.template store_columns<E4M3>(task, tile_row, tile_col, shared, /*has_nan=*/true,
                                    [&](int j) { return shared.column_scale[tile.col + j]; });
}

/// Amaxes become the reciprocals of their scales.
__global__ void __launch_bounds__(kTileThreads)
    finish_scales(const __grid_constant__ ActivationTask task) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kTileThreads + threadIdx.x;
  const auto finish = [&](float& x) {
    x = inverse_scale(scale_from_amax(x, kE4M3Max, task.power_of_two));
  };
  if (task.codes != nullptr && i < task.m_padded) finish(task.scale_inv[i]);
  if (task.codes_t != nullptr && i < task.k_padded) finish(task.scale_inv_t[i]);
}

/// Without amaxes yet.
cudaError_t clear(float* scale_inv, int64_t count, cudaStream_t stream) {
  return cudaMemsetAsync(scale_inv, 0, static_cast<size_t>(count) * sizeof(float), stream);
}

template <typename Value, bool kFolded>
cudaError_t launch(const ActivationTask& task, bool vectorized, cudaStream_t stream) {
  const dim3 tiles = activation_grid(task);
  row_amaxes<Value, kFolded><<<tiles, kTileThreads, 0, stream>>>(task, vectorized);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  quantize_in_rows<Value, kFolded><<<tiles, kTileThreads, 0, stream>>>(task, vectorized);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const int64_t rows = task.codes != nullptr ? task.m_padded : 0;
  const int64_t columns = task.codes_t != nullptr ? task.k_padded : 0;
  const int64_t blocks = ((rows > columns ? rows : columns) + kTileThreads - 1) / kTileThreads;
  finish_scales<<<static_cast<unsigned>(blocks), kTileThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_quantize_activation_in_rows(const ActivationTask& task, DType value_dtype,
                                               cudaStream_t stream) {
  const bool has_any = task.codes != nullptr || task.codes_t != nullptr;
  if (task.m == 0 || task.k == 0 || !has_any) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  if (task.codes != nullptr) error = clear(task.scale_inv, task.m_padded, stream);
  if (error == cudaSuccess && task.codes_t != nullptr) {
    error = clear(task.scale_inv_t, task.k_padded, stream);
  }
  if (error != cudaSuccess) return error;
  const bool vectorized = activation_is_vectorized(task, value_dtype);
  return with_value_type(value_dtype, [&](auto value) {
    using Value = decltype(value);
    return task.column_factors != nullptr ? launch<Value, true>(task, vectorized, stream)
                                          : launch<Value, false>(task, vectorized, stream);
  });
}

}  // namespace qshard::cuda
