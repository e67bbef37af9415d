// Codes of normalized rows, whose values are never stored: of 16-bit values 2 B are read, and 1 B
// is written an element and orientation. The statistics that tiles want first are a pass of 2 B,
// which finds the amax of one scale on the way. Rowwise codes in blocks need no such pass: whoever
// holds a row has its statistics.
#include "kernels/cuda/activation_codes.cuh"
#include "kernels/cuda/norm_quantize_kernels.h"
#include "kernels/cuda/normalization.cuh"

namespace qshard::cuda {
namespace {

constexpr int kThreads = kTileThreads;  // of a tile
template <typename Value>
constexpr int kTilesAtOnce = Value::kPerWord == 2 ? 3 : 1;  // and multiprocessor, or more

/// The largest of the bits of a CUDA block's threads, for all of them. Synchronises the block.
__device__ __forceinline__ uint32_t max_of_rows(uint32_t bits) {
  __shared__ uint32_t largest;
  if (threadIdx.x == 0 && threadIdx.y == 0) largest = 0;
  __syncthreads();
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % min(blockDim.x, 32u) == 0) atomicMax(&largest, bits);
  __syncthreads();
  return largest;
}

template <typename Value, bool kRms, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads)
    norm_statistics(const __grid_constant__ NormTask task, float* amax) {
  __shared__ typename Lanes<kBlockThreads>::Shared shared;
  const NormRow<Value, kRms, kBlockThreads> row(task, Lanes<kBlockThreads>(shared));
  row.store_statistics(task);
  if (amax == nullptr) return;
  Vector<Value> y[kNormVectors] = {};
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = column_of<Value>(i);
    if (row.exists && at < task.cols) y[i] = row.vector(task, i, at);
  }
  const uint32_t largest = max_of_rows(largest_of<Value, kNormVectors>(y));
  if (threadIdx.x == 0 && threadIdx.y == 0) raise(amax, largest);
}

/// The values x of a tile become y; those outside of the matrix stay 0.
template <bool kRms, typename Value>
__device__ __forceinline__ void normalize(ActivationTile<Value, kThreads>& tile,
                                          const NormTask& task, int64_t tile_row,
                                          int64_t tile_col) {
  constexpr int kRows = ActivationTile<Value, kThreads>::kRows;
  constexpr int kCols = ActivationTile<Value, kThreads>::kCols;
  const int64_t at = tile_col + tile.col;
  if (at >= task.cols) return;
  const int64_t first = tile_row + tile.row;
  float mean[kRows] = {};
  float rstd[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i >= task.rows) continue;
    rstd[i] = __ldg(task.rstd + first + i);
    if constexpr (!kRms) mean[i] = __ldg(task.mean + first + i);
  }
  const NormParameters<Value> parameters(task, static_cast<int>(at));
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float x[kCols];
#pragma unroll
    for (int k = 0; k < kCols; ++k) {
      x[k] = Value::load(tile.values[i].word_of(k), k % Value::kPerWord);
      if constexpr (!kRms) x[k] = __fsub_rn(x[k], mean[i]);
    }
    if (first + i < task.rows) tile.values[i] = normed<Value>(x, rstd[i], parameters);
  }
}

template <typename Value, bool kRms, bool kBlocks>
__global__ void __launch_bounds__(kThreads, kTilesAtOnce<Value>)
    norm_quantize(const __grid_constant__ NormTask task, const __grid_constant__ ActivationTask out,
                  const float* amax) {
  using Tile = ActivationTile<Value, kThreads>;
  __shared__ typename Tile::Shared shared;
  // From the end: that is what the pass over the rows has left in the L2 cache.
  const int64_t tile_row = static_cast<int64_t>(gridDim.y - 1 - blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  Tile tile;
  tile.load(task.x, out.m, out.k, out.k, tile_row, tile_col, /*vectorized=*/true);
  normalize<kRms>(tile, task, tile_row, tile_col);
  if constexpr (kBlocks) {
    store_in_blocks(tile, out, tile_row, tile_col, shared);
  } else {
    const float scale = scale_from_amax(*amax, kE4M3Max, out.power_of_two);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) store_tensor_scale(out, scale);
    // A NaN has no sign that its code would need.
    tile.template store_both<E4M3>(out, tile_row, tile_col, shared, /*has_nan=*/false, scale);
  }
}

/// Rows beyond the matrix have codes, too.
template <typename Value, bool kRms, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads)
    norm_quantize_rows(const __grid_constant__ NormTask task,
                       const __grid_constant__ ActivationTask out) {
  constexpr int kLanesOfBlock = kTile / Vector<Value>::kSize;
  __shared__ typename Lanes<kBlockThreads>::Shared shared;
  const NormRow<Value, kRms, kBlockThreads> row(task, Lanes<kBlockThreads>(shared));
  row.store_statistics(task);
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = column_of<Value>(i);
    Vector<Value> y = {};
    if (row.exists && at < task.cols) y = row.vector(task, i, at);
    uint32_t amax = largest_of<Value, 1>(&y);
#pragma unroll
    for (int lane = kLanesOfBlock / 2; lane > 0; lane /= 2) {
      amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, lane));
    }
    if (row.index >= out.m_padded || at >= out.k_padded) continue;
    const float scale = scale_from_amax(__uint_as_float(amax), kE4M3Max, out.power_of_two);
    if (at % kTile == 0) {
      out.scale_inv[at / kTile * out.m_padded + row.index] = inverse_scale(scale);
    }
    store_bytes(out.codes + row.index * out.k_padded + at, encode_vector<E4M3, false>(y, scale));
  }
}

unsigned norm_blocks(const NormTask& task, int64_t rows) {
  const unsigned at_once = norm_block(task).y;
  return static_cast<unsigned>((rows + at_once - 1) / at_once);
}

}  // namespace

cudaError_t launch_norm_statistics(const NormTask& task, float* amax, cudaStream_t stream) {
  if (task.rows == 0 || task.cols == 0) return cudaSuccess;
  return with_norm_types(task, [&](auto value, auto rms, auto threads) {
    norm_statistics<decltype(value), rms(), threads()>
        <<<norm_blocks(task, task.rows), norm_block(task), 0, stream>>>(task, amax);
    return cudaGetLastError();
  });
}

cudaError_t launch_norm_quantize(const NormTask& task, const ActivationTask& out, const float* amax,
                                 cudaStream_t stream) {
  if (out.m == 0 || out.k == 0) return cudaSuccess;
  return with_value_type(task.dtype, [&](auto value) {
    using Value = decltype(value);
    const auto launch = [&](auto rms, auto blocks) {
      norm_quantize<Value, rms(), blocks()>
          <<<activation_grid(out), kThreads, 0, stream>>>(task, out, amax);
      return cudaGetLastError();
    };
    const auto with_blocks = [&](auto rms) {
      return amax == nullptr ? launch(rms, std::true_type{}) : launch(rms, std::false_type{});
    };
    return task.mean == nullptr ? with_blocks(std::true_type{}) : with_blocks(std::false_type{});
  });
}

bool can_quantize_norm_rows(const NormTask& task, const ActivationTask& out) {
  return out.codes != nullptr && out.codes_t == nullptr && task.cols > kTile;
}

cudaError_t launch_norm_quantize_rows(const NormTask& task, const ActivationTask& out,
                                      cudaStream_t stream) {
  if (out.m == 0 || out.k == 0) return cudaSuccess;
  return with_norm_types(task, [&](auto value, auto rms, auto threads) {
    norm_quantize_rows<decltype(value), rms(), threads()>
        <<<norm_blocks(task, out.m_padded), norm_block(task), 0, stream>>>(task, out);
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
