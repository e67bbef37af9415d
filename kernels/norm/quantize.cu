// Codes of normalized rows, whose values are never stored: a kernel reads 2 B of each 16-bit value,
// and writes 1 B for each orientation. Tiles want the statistics first, which takes a pass of 2 B;
// it finds the amax of one scale on the way. Rowwise codes in blocks need no such pass: the threads
// that hold a row have its statistics.
#include "kernels/activation/codes.cuh"
#include "kernels/device/amax.cuh"
#include "kernels/norm/quantize_kernels.h"
#include "kernels/norm/rows.cuh"

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

// Statistics alone need no parameters. Those of RMSNorm with an amax want the registers of two
// blocks.
template <typename Value, bool kRms, int kBlockThreads, bool kAmax>
constexpr RowCosts kStatisticsCosts = {
    .rows = kRowsAtOnce<kBlockThreads>,
    .parameters = !kAmax ? ParametersIn::kMemory
                  : kRms ? ParametersIn::kRegisters
                         : ParametersIn::kShared,
    .ahead_in_registers = true,
    .unpacked = true,
    .threads_at_once = kAmax&& kRms ? kThreadsAtOnce<kBlockThreads>
                                    : std::max(kThreadsAtOnce<kBlockThreads>, 768)};

template <typename Value, bool kRms, int kBlockThreads, bool kAmax>
__global__ void __launch_bounds__(
    kBlockThreads,
    norm_blocks_at_once<kBlockThreads>(kStatisticsCosts<Value, kRms, kBlockThreads, kAmax>))
    norm_statistics(const __grid_constant__ NormTask task, float* amax) {
  constexpr RowCosts kCosts = kStatisticsCosts<Value, kRms, kBlockThreads, kAmax>;
  uint32_t largest = 0;  // magnitudes of a word
  const auto look = [&](const auto& rows, const auto& parameters, const auto&) {
    if constexpr (kAmax) {
      uint32_t magnitudes[kCosts.rows];  // of a word; of rows that are not there none
#pragma unroll
      for (int row = 0; row < kCosts.rows; ++row) {
        magnitudes[row] = rows.exists(row) ? Value::magnitudes(~0u) : 0;
      }
#pragma unroll
      for (int i = 0; i < kNormVectors; ++i) {
        const auto of_columns = parameters.of(i);
#pragma unroll
        for (int row = 0; row < kCosts.rows; ++row) {
          const Vector<Value> y = rows.vector(row, i, of_columns);
#pragma unroll
          for (uint32_t word : y.word) largest = Value::max(largest, word & magnitudes[row]);
        }
      }
    }
  };
  for_rows<Value, kRms, kBlockThreads, kCosts>(task, task.rows, look);
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
    store_in_blocks(tile, out, {tile_row, tile_row}, tile_col, shared);
  } else {
    const float scale = scale_from_amax(*amax, kE4M3Max, out.power_of_two);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) store_tensor_scale(out, scale);
    // A NaN has no sign that its code would need.
    tile.template store_both<E4M3>(out, tile_row, tile_col, shared, /*has_nan=*/false, scale);
  }
}

/// Which of a block's lanes knows what: a word has a vector of fp32, or both vectors of 16-bit
/// values.
template <typename Value, int kRows>
struct BlockLanes {
  static_assert(kNormVectors == 2);
  static constexpr bool kPairs = Value::kPerWord == 2;
  static constexpr int kCount = kTile / Vector<Value>::kSize;
  static constexpr int kWords = kPairs ? kRows : 2 * kRows;
  static constexpr int kOfWord = kCount / kWords;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kCount; }
  __device__ static int row() { return lane() / kOfWord / (kPairs ? 1 : 2); }
  __device__ static int vector() { return (kPairs ? lane() : lane() / kOfWord) % 2; }
  /// The lane that stands for a row's vector.
  __device__ static int of(int row, int vector) {
    return kPairs ? row * kOfWord + vector : (2 * row + vector) * kOfWord;
  }
};

/// The amax of the block that the lane's vector of its row lies in.
template <typename Value, int kRows>
__device__ __forceinline__ float block_amax(const Vector<Value> (&y)[kRows][kNormVectors]) {
  using Block = BlockLanes<Value, kRows>;
  uint32_t words[Block::kWords];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    uint32_t of[kNormVectors];
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      of[i] = largest_word_of<Value, 1>(&y[row][i]);
      if constexpr (!Block::kPairs) words[2 * row + i] = of[i];
    }
    if constexpr (Block::kPairs) {
      words[row] = Value::max(__byte_perm(of[0], of[1], 0x5410), __byte_perm(of[0], of[1], 0x7632));
    }
  }
  uint32_t mine =
      over_lanes<Block::kCount>(words, [](uint32_t a, uint32_t b) { return Value::max(a, b); });
  if constexpr (Block::kPairs) mine = __byte_perm(mine, 0, Block::vector() == 1 ? 0x3232 : 0x1010);
  return __uint_as_float(Value::amax_bits(mine));
}

/// The scales of the blocks that a thread's vectors lie in, by which their codes are made; stores
/// them. Each of a block's lanes computes one.
template <typename Value, typename Rows, int kRows>
__device__ __forceinline__ void block_scales(const Vector<Value> (&y)[kRows][kNormVectors],
                                             const Rows& rows, const ActivationTask& out,
                                             float (&scales)[kRows][kNormVectors]) {
  using Block = BlockLanes<Value, kRows>;
  const float mine = scale_from_amax(block_amax<Value>(y), kE4M3Max, out.power_of_two);
  const int of_row = rows.index(Block::row());
  const int block = Columns<Value>::first(Block::vector()) / kTile;
  if (Block::lane() == Block::of(Block::row(), Block::vector()) && of_row < out.m_padded &&
      block * kTile < out.k_padded) {
    out.scale_inv[block * out.m_padded + of_row] = inverse_scale(mine);
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      scales[row][i] = __shfl_sync(kWholeWarp, mine, Block::of(row, i), Block::kCount);
    }
  }
}

template <typename Value, bool kRms, int kBlockThreads>
constexpr RowCosts kQuantizeCosts = {
    .rows = kRowsAtOnce<kBlockThreads>,
    .parameters = kRms ? ParametersIn::kRegisters : ParametersIn::kShared,
    .ahead_in_registers = false,
    .unpacked = false,
    .threads_at_once = kThreadsAtOnce<kBlockThreads>};

/// Rows beyond the matrix have codes, too.
template <typename Value, bool kRms, int kBlockThreads>
__global__ void __launch_bounds__(
    kBlockThreads, norm_blocks_at_once<kBlockThreads>(kQuantizeCosts<Value, kRms, kBlockThreads>))
    norm_quantize_rows(const __grid_constant__ NormTask task,
                       const __grid_constant__ ActivationTask out) {
  constexpr RowCosts kCosts = kQuantizeCosts<Value, kRms, kBlockThreads>;
  constexpr int kRows = kCosts.rows;
  const auto quantize = [&](const auto& rows, const auto& parameters, const auto& columns) {
    Vector<Value> y[kRows][kNormVectors] = {};
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      const auto of_columns = parameters.of(i);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (columns.has(i, rows.index(row))) y[row][i] = rows.vector(row, i, of_columns);
      }
    }
    float scales[kRows][kNormVectors];
    block_scales<Value>(y, rows, out, scales);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (rows.index(row) >= out.m_padded) continue;
      uint8_t* codes = out.codes + rows.index(row) * out.k_padded;
#pragma unroll
      for (int i = 0; i < kNormVectors; ++i) {
        const int at = Columns<Value>::first(i);
        if (at >= out.k_padded) continue;
        store_bytes(codes + at, encode_vector<E4M3, false>(y[row][i], scales[row][i]));
      }
    }
  };
  for_rows<Value, kRms, kBlockThreads, kCosts>(task, out.m_padded, quantize);
}

}  // namespace

cudaError_t launch_norm_statistics(const NormTask& task, float* amax, cudaStream_t stream) {
  if (task.rows == 0 || task.cols == 0) return cudaSuccess;
  return with_norm_types(task, [&](auto value, auto rms, auto threads) {
    using Value = decltype(value);
    const auto launch = [&](auto of_amax) {
      constexpr RowCosts kCosts = kStatisticsCosts<Value, rms(), threads(), of_amax()>;
      return launch_for_rows<Value, rms(), threads(), kCosts>(
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
    return launch_for_rows<Value, rms(), threads(), kCosts>(
        norm_quantize_rows<Value, rms(), threads()>, task, out.m_padded, stream, out);
  });
}

}  // namespace qshard::cuda
