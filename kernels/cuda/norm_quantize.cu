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
  bits = __reduce_max_sync(kWholeWarp, bits);
  if (threadIdx.x % min(blockDim.x, 32u) == 0) atomicMax(&largest, bits);
  __syncthreads();
  return largest;
}

// Statistics alone need no parameters.
template <typename Value, bool kRms, int kBlockThreads, bool kAmax>
constexpr RowCosts kStatisticsCosts = {
    .parameters = kAmax ? kParametersIn<Value, kRms, kBlockThreads> : ParametersIn::kMemory,
    .ahead_in_registers = true,
    .unpacked = true};

template <typename Value, bool kRms, int kBlockThreads, bool kAmax>
__global__ void __launch_bounds__(
    kBlockThreads, kNormBlocksAtOnce<Value, kRms, kBlockThreads,
                                     kStatisticsCosts<Value, kRms, kBlockThreads, kAmax>>)
    norm_statistics(const __grid_constant__ NormTask task, float* amax) {
  uint32_t largest = 0;  // magnitudes of a word
  const auto look = [&](const auto& row, const auto& parameters) {
    if constexpr (kAmax) {
      if (!row.exists) return;
#pragma unroll
      for (int i = 0; i < kNormVectors; ++i) {
        if (column_of<Value>(i) >= task.cols) continue;
        const Vector<Value> y = row.vector(i, parameters);
#pragma unroll
        for (uint32_t word : y.word) largest = Value::max(largest, Value::magnitudes(word));
      }
    }
  };
  for_rows<Value, kRms, kBlockThreads, kStatisticsCosts<Value, kRms, kBlockThreads, kAmax>>(
      task, task.rows, look);
  if constexpr (kAmax) {
    largest = max_of_rows(Value::amax_bits(largest));
    if (threadIdx.x == 0 && threadIdx.y == 0) raise(amax, largest);
  }
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
  const NormParameters<Value, kRms> parameters(task, static_cast<int>(at));
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

/// The amax of a block that each of a thread's vectors lies in: even lanes have the first one's,
/// odd ones the other's.
template <typename Value>
__device__ __forceinline__ float block_amax(const Vector<Value> (&y)[kNormVectors]) {
  static_assert(kNormVectors == 2);
  constexpr int kLanes = kTile / Vector<Value>::kSize;  // of a block
  const bool odd = threadIdx.x % 2 != 0;
  if constexpr (Value::kPerWord == 2) {
    // Both in a word.
    uint32_t of[kNormVectors] = {};
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
#pragma unroll
      for (uint32_t word : y[i].word) of[i] = Value::max(of[i], Value::magnitudes(word));
    }
    uint32_t both =
        Value::max(__byte_perm(of[0], of[1], 0x5410), __byte_perm(of[0], of[1], 0x7632));
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) {
      both = Value::max(both, __shfl_xor_sync(kWholeWarp, both, lane));
    }
    return __uint_as_float(Value::amax_bits(__byte_perm(both, 0, odd ? 0x3232 : 0x1010)));
  } else {
    uint32_t amax[kNormVectors];
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      amax[i] = largest_of<Value, 1>(&y[i]);
#pragma unroll
      for (int lane = kLanes / 2; lane > 0; lane /= 2) {
        amax[i] = max(amax[i], __shfl_xor_sync(kWholeWarp, amax[i], lane));
      }
    }
    return __uint_as_float(odd ? amax[1] : amax[0]);
  }
}

/// The scales of the blocks that a thread's vectors lie in, by which their codes are made; stores
/// them. Of each block's lanes the even ones compute that of the first, the odd ones the other.
template <typename Value>
__device__ __forceinline__ void block_scales(const Vector<Value> (&y)[kNormVectors], int row,
                                             const ActivationTask& out,
                                             float (&scales)[kNormVectors]) {
  constexpr int kLanesOfBlock = kTile / Vector<Value>::kSize;
  const bool odd = threadIdx.x % 2 != 0;
  const float mine = scale_from_amax(block_amax<Value>(y), kE4M3Max, out.power_of_two);
  const int block = column_of<Value>(odd ? 1 : 0) / kTile;
  if (threadIdx.x % kLanesOfBlock < 2 && row < out.m_padded && block * kTile < out.k_padded) {
    out.scale_inv[block * out.m_padded + row] = inverse_scale(mine);
  }
  const float other = __shfl_xor_sync(kWholeWarp, mine, 1);
  scales[0] = odd ? other : mine;
  scales[1] = odd ? mine : other;
}

template <typename Value, bool kRms, int kBlockThreads>
constexpr RowCosts kQuantizeCosts = {.parameters = kParametersIn<Value, kRms, kBlockThreads>,
                                     .ahead_in_registers = false};

/// Rows beyond the matrix have codes, too.
template <typename Value, bool kRms, int kBlockThreads>
__global__ void __launch_bounds__(
    kBlockThreads,
    kNormBlocksAtOnce<Value, kRms, kBlockThreads, kQuantizeCosts<Value, kRms, kBlockThreads>>)
    norm_quantize_rows(const __grid_constant__ NormTask task,
                       const __grid_constant__ ActivationTask out) {
  const auto quantize = [&](const auto& row, const auto& parameters) {
    Vector<Value> y[kNormVectors] = {};
    if (row.exists) {
#pragma unroll
      for (int i = 0; i < kNormVectors; ++i) {
        if (column_of<Value>(i) < task.cols) y[i] = row.vector(i, parameters);
      }
    }
    float scales[kNormVectors];
    block_scales<Value>(y, row.index, out, scales);
    if (row.index >= out.m_padded) return;
    uint8_t* codes = out.codes + row.index * out.k_padded;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      const int at = column_of<Value>(i);
      if (at >= out.k_padded) continue;
      store_bytes(codes + at, encode_vector<E4M3, false>(y[i], scales[i]));
    }
  };
  for_rows<Value, kRms, kBlockThreads, kQuantizeCosts<Value, kRms, kBlockThreads>>(
      task, out.m_padded, quantize);
}

/// Launches a kernel of for_rows(): as many threads at once, and what they need.
template <int kThreadsAtOnce, RowCosts kCosts, typename Kernel, typename... Arguments>
cudaError_t launch_rows(Kernel kernel, const NormTask& task, int64_t rows, cudaStream_t stream,
                        Arguments... arguments) {
  const int bytes = kCosts.parameters == ParametersIn::kShared ? parameter_bytes(task) : 0;
  if (bytes > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<norm_blocks(task, rows, kThreadsAtOnce), norm_block(task), bytes, stream>>>(
      task, arguments...);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_norm_statistics(const NormTask& task, float* amax, cudaStream_t stream) {
  if (task.rows == 0 || task.cols == 0) return cudaSuccess;
  return with_norm_types(task, [&](auto value, auto rms, auto threads) {
    using Value = decltype(value);
    const auto launch = [&](auto of_amax) {
      constexpr RowCosts kCosts = kStatisticsCosts<Value, rms(), threads(), of_amax()>;
      return launch_rows<kNormThreadsAtOnce<Value, rms(), kCosts>, kCosts>(
          norm_statistics<Value, rms(), threads(), of_amax()>, task, task.rows, stream, amax);
    };
    return amax != nullptr ? launch(std::true_type{}) : launch(std::false_type{});
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
    using Value = decltype(value);
    constexpr RowCosts kCosts = kQuantizeCosts<Value, rms(), threads()>;
    return launch_rows<kNormThreadsAtOnce<Value, rms(), kCosts>, kCosts>(
        norm_quantize_rows<Value, rms(), threads()>, task, out.m_padded, stream, out);
  });
}

}  // namespace qshard::cuda
