#include "kernels/activation/codes.cuh"
#include "kernels/device/amax.cuh"
#include "kernels/swiglu/swiglu.cuh"

namespace qshard::cuda {
namespace {

// Three tiles of 16-bit values are 48 registers of a thread. Two CUDA blocks fit at once where
// codes are made in the other 16: the product waits in shared memory, as far as that is static. One
// block of fp32 values fits, and for fp16 the compiler keeps the converted values, too.
constexpr int kThreads = 512;
template <typename Value>
constexpr int kAmaxBlocksAtOnce = Value::kPerWord;
template <typename Value>
constexpr int kBlocksAtOnce = std::is_same_v<Value, BFloat16> ? 2 : 1;
template <typename Value>
constexpr int kRowsWaiting = std::is_same_v<Value, BFloat16> ? 3 : 0;

/// What a CUDA block makes of its tile: the two gradients, and silu(gate) * up. Without up the
/// first gradient and the product.
template <typename Value, typename Kind>
struct BackwardTiles {
  using Tile = ActivationTile<Value, kThreads>;
  Kind kind;
  Tile grad_gate, grad_up, product;

  __device__ __forceinline__ explicit BackwardTiles(const SwigluTask& task) : kind(task) {}

  __device__ __forceinline__ void load_grad(const SwigluTask& task, int64_t tile_row,
                                            int64_t tile_col) {
    grad_gate.load(task.grad, task.m, task.k, task.k, tile_row, tile_col, kind.vectorized());
  }
  __device__ __forceinline__ void load_rest(const SwigluTask& task, int64_t tile_row,
                                            int64_t tile_col) {
    load_factors(task, tile_row, tile_col);
    swiglu_backward<Tile::kRows>(kind, grad_gate.values, grad_up.values, product.values);
  }

  /// The same row by row, which takes fewer registers; done(i) once a thread's i-th row is there.
  template <typename Done>
  __device__ __forceinline__ void load_by_rows(const SwigluTask& task, int64_t tile_row,
                                               int64_t tile_col, const Done& done) {
    const bool vectorized = kind.vectorized();
    if (!vectorized) {
      load_grad(task, tile_row, tile_col);
      load_factors(task, tile_row, tile_col);
    }
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      if (vectorized) {
        load_row(grad_up, i, task.gate, task, task.ld_gate, tile_row, tile_col);
        if constexpr (Kind::kGated) {
          load_row(product, i, task.up, task, task.ld_up, tile_row, tile_col);
        }
        load_row(grad_gate, i, task.grad, task, task.k, tile_row, tile_col);
      }
      swiglu_backward<1>(kind, grad_gate.values + i, grad_up.values + i, product.values + i);
      done(i);
    }
  }

 private:
  __device__ __forceinline__ void load_factors(const SwigluTask& task, int64_t tile_row,
                                               int64_t tile_col) {
    const bool vectorized = kind.vectorized();
    grad_up.load(task.gate, task.m, task.k, task.ld_gate, tile_row, tile_col, vectorized);
    if constexpr (Kind::kGated) {
      product.load(task.up, task.m, task.k, task.ld_up, tile_row, tile_col, vectorized);
    }
  }
  __device__ __forceinline__ static void load_row(Tile& tile, int i, const void* from,
                                                  const SwigluTask& task, int64_t ld,
                                                  int64_t tile_row, int64_t tile_col) {
    const int64_t r = tile_row + tile.row + i;
    const int64_t c = tile_col + tile.col;
    tile.values[i] = {};
    if (r < task.m && c < task.k) {
      tile.values[i] =
          load_vector<Value>(static_cast<const typename Value::Raw*>(from) + r * ld + c);
    }
  }
};

/// Stores the sums of the tile's columns. Synchronises the CUDA block, which may use `shared` then.
template <typename Value>
__device__ __forceinline__ void store_column_sums(
    const ActivationTile<Value, kThreads>& tile, float* sums, int64_t k, int64_t tile_row,
    int64_t tile_col, typename ActivationTile<Value, kThreads>::Shared& shared) {
  using Tile = ActivationTile<Value, kThreads>;
  static_assert(sizeof(shared.transposed) >= sizeof(float) * Tile::kWarps * kTile);
  auto* of_warps = reinterpret_cast<float*>(shared.transposed);
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int j = 0; j < Tile::kCols; ++j) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      sum = __fadd_rn(sum, Value::load(tile.values[i].word_of(j), j % Value::kPerWord));
    }
#pragma unroll
    for (int lane = Tile::kLanesPerRow; lane < 32; lane *= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(kWholeWarp, sum, lane));
    }
    if (threadIdx.x % 32 < Tile::kLanesPerRow) of_warps[warp * kTile + tile.col + j] = sum;
  }
  __syncthreads();
  const int64_t c = tile_col + threadIdx.x;
  if (threadIdx.x < kTile && c < k) {
    float sum = of_warps[threadIdx.x];
#pragma unroll
    for (int i = 1; i < Tile::kWarps; ++i) {
      sum = __fadd_rn(sum, of_warps[i * kTile + threadIdx.x]);
    }
    sums[tile_row / kTile * k + c] = sum;
  }
  __syncthreads();
}

constexpr int kSumWarps = 8;

__global__ void __launch_bounds__(32 * kSumWarps)
    swiglu_column_sums(const float* column_sums, int64_t count, int64_t k, float* sums) {
  __shared__ float of_warps[kSumWarps][32];
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0.f;
  if (c < k) {
#pragma unroll 8
    for (int64_t i = threadIdx.y; i < count; i += kSumWarps) {
      sum = __fadd_rn(sum, __ldg(column_sums + i * k + c));
    }
  }
  of_warps[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= k) return;
  for (int warp = 1; warp < kSumWarps; ++warp) sum = __fadd_rn(sum, of_warps[warp][threadIdx.x]);
  sums[c] = sum;
}

/// A warp whose gradients cannot change the scales of the amaxes so far is done once it has read
/// `grad`.
template <typename Value, typename Kind>
__global__ void __launch_bounds__(kThreads, kAmaxBlocksAtOnce<Value>)
    swiglu_backward_amax(const __grid_constant__ SwigluTask task, const float* maxima,
                         float* gate_amax, float* up_amax, bool power_of_two) {
  constexpr int kRows = ActivationTile<Value, kThreads>::kRows;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  BackwardTiles<Value, Kind> tiles(task);
  tiles.load_grad(task, tile_row, tile_col);
  // So far: the same for all threads, while others raise them.
  __shared__ uint32_t raised[2];
  if (threadIdx.x < 2) {
    const volatile float* amax = threadIdx.x == 0 ? gate_amax : up_amax;
    raised[threadIdx.x] = __float_as_uint(largest_of_same_scale(*amax, kE5M2Max, power_of_two));
  }
  __syncthreads();
  const auto amax_of = [](const auto& tile) {
    return __reduce_max_sync(kWholeWarp, largest_of<Value, kRows>(tile.values));
  };
  if (maxima != nullptr) {
    const auto strip = StripMaxima::load<kThreads>(maxima);
    const uint32_t grad = amax_of(tiles.grad_gate);
    if (strip.template cannot_raise<Value>(tiles.kind, grad, raised[0], raised[1])) return;
  }
  tiles.load_rest(task, tile_row, tile_col);
  const uint32_t gate = amax_of(tiles.grad_gate);
  uint32_t up = 0;
  if constexpr (Kind::kGated) up = amax_of(tiles.grad_up);
  if (threadIdx.x % 32 != 0) return;
  if (gate > raised[0]) raise(gate_amax, gate);
  if (up > raised[1]) raise(up_amax, up);
}

/// `tiles`: of groups of rows, in blocks; null: the tiles of all rows.
template <typename Value, typename Kind, bool kBlocks, bool kGroups = false>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<Value>)
    swiglu_backward_quantize(const __grid_constant__ SwigluTask task,
                             const __grid_constant__ SwigluGradients out,
                             const RowTile* tiles_of_groups) {
  __shared__ typename ActivationTile<Value, kThreads>::Shared shared;
  RowTile group;
  if constexpr (kGroups) {
    group = tiles_of_groups[blockIdx.y];
    if (group.row < 0) return;
  }
  // From the end: that is what the amax pass has left in the L2 cache.
  const int64_t tile_row =
      kGroups ? group.row : static_cast<int64_t>(gridDim.y - 1 - blockIdx.y) * kTile;
  const TilePlace place = {tile_row, kGroups ? group.column : tile_row};
  const auto own = [&](const auto& whole) {
    if constexpr (kGroups) {
      return of_group(whole, group);
    } else {
      return whole;
    }
  };
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  const bool is_first = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0;
  constexpr int kWaiting = kRowsWaiting<Value>;
  __shared__ Vector<Value> waiting[kWaiting > 0 ? kWaiting : 1][kWaiting > 0 ? kThreads : 1];
  BackwardTiles<Value, Kind> tiles(task);
  tiles.load_by_rows(own(task), tile_row, tile_col, [&](int i) {
    if (i < kWaiting) waiting[i][threadIdx.x] = tiles.product.values[i];
  });
  const auto store = [&](const auto& tile, const SwigluImage& image, auto code) {
    const float amax = *image.amax;
    const float scale = scale_from_amax(amax, decltype(code)::kMax, image.task.power_of_two);
    if (is_first) store_tensor_scale(image.task, scale);
    tile.template store_both<decltype(code)>(image.task, tile_row, tile_col, shared, isnan(amax),
                                             scale);
  };
  const auto store_gradient = [&](const auto& tile, const SwigluImage& image) {
    if constexpr (!kGroups) {
      if (image.column_sums != nullptr) {
        store_column_sums(tile, image.column_sums, task.k, tile_row, tile_col, shared);
      }
    }
    if constexpr (kBlocks) {
      store_1x128(tile, own(image.task), place, tile_col, shared);
    } else {
      store(tile, image, E5M2{});
    }
  };
  store_gradient(tiles.grad_gate, out.gate);
  if constexpr (Kind::kGated) {
    __syncthreads();  // of `shared`
    store_gradient(tiles.grad_up, out.up);
  }
  if (out.input.task.codes_t == nullptr) return;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWaiting; ++i) tiles.product.values[i] = waiting[i][threadIdx.x];
  if constexpr (kBlocks) {
    store_in_blocks(tiles.product, own(out.input.task), place, tile_col, shared);
  } else {
    store(tiles.product, out.input, E4M3{});
  }
}

}  // namespace

cudaError_t launch_swiglu_backward_amax(const SwigluTask& task, const float* maxima,
                                        float* gate_amax, float* up_amax, bool power_of_two,
                                        DType value_dtype, cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  return with_activation_types(task, value_dtype, [&](auto value, auto kind, const auto& of) {
    swiglu_backward_amax<decltype(value), typename decltype(kind)::Type>
        <<<swiglu_grid(task), kThreads, 0, stream>>>(of, maxima, gate_amax, up_amax, power_of_two);
    return cudaGetLastError();
  });
}

cudaError_t launch_swiglu_backward_quantize(const SwigluTask& task, const SwigluGradients& out,
                                            DType value_dtype, cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  return with_activation_types(task, value_dtype, [&](auto value, auto kind, const auto& of) {
    using Value = decltype(value);
    using Kind = typename decltype(kind)::Type;
    const dim3 grid = swiglu_grid(task);
    if (out.gate.amax == nullptr) {
      swiglu_backward_quantize<Value, Kind, true><<<grid, kThreads, 0, stream>>>(of, out, nullptr);
    } else {
      swiglu_backward_quantize<Value, Kind, false><<<grid, kThreads, 0, stream>>>(of, out, nullptr);
    }
    return cudaGetLastError();
  });
}

cudaError_t launch_swiglu_column_sums(const float* column_sums, int64_t count, int64_t k,
                                      float* sums, cudaStream_t stream) {
  if (k == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((k + 31) / 32));
  swiglu_column_sums<<<grid, dim3(32, kSumWarps), 0, stream>>>(column_sums, count, k, sums);
  return cudaGetLastError();
}

cudaError_t launch_swiglu_backward_quantize_groups(const SwigluTask& task,
                                                   const SwigluGradients& out, const RowTile* tiles,
                                                   int64_t count, DType value_dtype,
                                                   cudaStream_t stream) {
  if (task.m == 0 || task.k == 0 || count == 0) return cudaSuccess;
  const dim3 grid(swiglu_grid(task).x, static_cast<unsigned>(count));
  return with_swiglu_types(task, value_dtype, [&](auto value, auto kind) {
    swiglu_backward_quantize<decltype(value), typename decltype(kind)::Type, true, true>
        <<<grid, kThreads, 0, stream>>>(task, out, tiles);
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
