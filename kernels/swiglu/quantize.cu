#include <algorithm>

#include "kernels/activation/codes.cuh"
#include "kernels/activation/previous_amax.cuh"
#include "kernels/device/amax.cuh"
#include "kernels/swiglu/swiglu.cuh"

namespace qshard::cuda {
namespace {

// Two tiles of 16-bit values are 32 registers of a thread, and two CUDA blocks fit at once.
constexpr int kThreads = 512;

template <typename Value, typename Kind>
struct SwigluTile {
  using Tile = ActivationTile<Value, kThreads>;
  Kind kind;
  Tile product, up;

  __device__ SwigluTile(const SwigluTask& task, int64_t tile_row, int64_t tile_col) : kind(task) {
    const bool vectorized = kind.vectorized();
    product.load(task.gate, task.m, task.k, task.ld_gate, tile_row, tile_col, vectorized);
    if constexpr (Kind::kGated) {
      up.load(task.up, task.m, task.k, task.ld_up, tile_row, tile_col, vectorized);
    }
  }
  template <typename Seen>
  __device__ __forceinline__ void multiply(const Seen& seen) {
    swiglu(kind, product, up, seen);
  }
  __device__ __forceinline__ void multiply() {
    multiply([](uint32_t) {});
  }
  /// Returns the amax of the thread's products.
  __device__ __forceinline__ uint32_t multiply_and_note(float* maxima) {
    const auto of_warp = [](uint32_t bits) { return __reduce_max_sync(kWholeWarp, bits); };
    uint32_t of_up = 0;
    if constexpr (Kind::kGated) of_up = of_warp(largest_of<Value, Tile::kRows>(up.values));
    uint32_t silu = 0;
    multiply([&](uint32_t word) { silu = Value::max(silu, Value::magnitudes(word)); });
    const StripMaxima strip = {of_warp(Value::amax_bits(silu)), of_up};
    if (threadIdx.x % 32 == 0) strip.template store<kThreads>(maxima);
    return largest_of<Value, Tile::kRows>(product.values);
  }
};

template <typename Value, typename Kind>
__global__ void __launch_bounds__(kThreads)
    swiglu_amax(const __grid_constant__ SwigluTask task, float* maxima) {
  SwigluTile<Value, Kind> tile(task, static_cast<int64_t>(blockIdx.y) * kTile,
                               static_cast<int64_t>(blockIdx.x) * kTile);
  const uint32_t amax = max_of_block<kThreads>(tile.multiply_and_note(maxima));
  if (threadIdx.x == 0) raise(maxima, amax);
}

/// Makes codes by the previous amax, if there is one, and the maxima.
template <typename Value, typename Kind>
__global__ void __launch_bounds__(kThreads)
    swiglu_quantize_by_previous(const __grid_constant__ SwigluTask task,
                                const __grid_constant__ ActivationTask out,
                                const __grid_constant__ PreviousAmax previous, float* maxima) {
  __shared__ typename ActivationTile<Value, kThreads>::Shared shared;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  SwigluTile<Value, Kind> tile(task, tile_row, tile_col);
  const uint32_t own = tile.multiply_and_note(maxima);
  if (is_known(previous)) {
    const float scale = scale_from_amax(*previous.amax, kE4M3Max, out.power_of_two);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) store_tensor_scale(out, scale);
    tile.product.template store_both<E4M3>(out, tile_row, tile_col, shared, is_nan(own), scale);
  }
  // Last: threads meet here.
  const uint32_t amax = max_of_block<kThreads>(own);
  if (threadIdx.x == 0) raise(maxima, amax);
}

template <typename Value, typename Kind>
__global__ void __launch_bounds__(kThreads)
    swiglu_finish_by_previous(const __grid_constant__ SwigluTask task,
                              const __grid_constant__ ActivationTask out,
                              const __grid_constant__ PreviousAmax previous, const float* maxima,
                              dim3 tiles) {
  __shared__ typename ActivationTile<Value, kThreads>::Shared shared;
  finish_codes<E4M3>(out, previous, *maxima, tiles, shared,
                     [&](int64_t tile_row, int64_t tile_col) {
                       SwigluTile<Value, Kind> tile(task, tile_row, tile_col);
                       tile.multiply();
                       return tile.product;
                     });
}

template <typename Value, typename Kind, bool kBlocks>
__global__ void __launch_bounds__(kThreads)
    swiglu_quantize(const __grid_constant__ SwigluTask task,
                    const __grid_constant__ SwigluImage out) {
  __shared__ typename ActivationTile<Value, kThreads>::Shared shared;
  // From the end: that is what the amax pass has left in the L2 cache.
  const int64_t tile_row = static_cast<int64_t>(gridDim.y - 1 - blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  SwigluTile<Value, Kind> values(task, tile_row, tile_col);
  values.multiply();
  const auto& tile = values.product;
  if constexpr (kBlocks) {
    store_in_blocks(tile, out.task, {tile_row, tile_row}, tile_col, shared);
  } else {
    const float scale = scale_from_amax(*out.amax, kE4M3Max, out.task.power_of_two);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) store_tensor_scale(out.task, scale);
    tile.template store_both<E4M3>(out.task, tile_row, tile_col, shared, isnan(*out.amax), scale);
  }
}

template <typename Value, typename Kind>
__global__ void __launch_bounds__(kThreads)
    swiglu_quantize_groups(const __grid_constant__ SwigluTask task,
                           const __grid_constant__ ActivationTask out, const RowTile* tiles) {
  __shared__ typename ActivationTile<Value, kThreads>::Shared shared;
  const RowTile place = tiles[blockIdx.y];
  if (place.row < 0) return;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  SwigluTile<Value, Kind> values(of_group(task, place), place.row, tile_col);
  values.multiply();
  store_in_blocks(values.product, of_group(out, place), {place.row, place.column}, tile_col,
                  shared);
}

}  // namespace

cudaError_t launch_swiglu_quantize_groups(const SwigluTask& task, const ActivationTask& out,
                                          const RowTile* tiles, int64_t count, DType value_dtype,
                                          cudaStream_t stream) {
  if (task.m == 0 || task.k == 0 || count == 0) return cudaSuccess;
  const dim3 grid(swiglu_grid(task).x, static_cast<unsigned>(count));
  return with_swiglu_types(task, value_dtype, [&](auto value, auto kind) {
    swiglu_quantize_groups<decltype(value), typename decltype(kind)::Type>
        <<<grid, kThreads, 0, stream>>>(task, out, tiles);
    return cudaGetLastError();
  });
}

cudaError_t launch_swiglu_maxima(const SwigluTask& task, float* maxima, DType value_dtype,
                                 cudaStream_t stream) {
  const cudaError_t zeroed = cudaMemsetAsync(maxima, 0, sizeof(float), stream);
  if (zeroed != cudaSuccess || task.m == 0 || task.k == 0) return zeroed;
  return with_activation_types(task, value_dtype, [&](auto value, auto kind, const auto& of) {
    swiglu_amax<decltype(value), typename decltype(kind)::Type>
        <<<swiglu_grid(task), kThreads, 0, stream>>>(of, maxima);
    return cudaGetLastError();
  });
}

cudaError_t launch_swiglu_quantize_by_previous(const SwigluTask& task, const ActivationTask& out,
                                               const PreviousAmax& previous, float* maxima,
                                               DType value_dtype, cudaStream_t stream) {
  const cudaError_t zeroed = cudaMemsetAsync(maxima, 0, sizeof(float), stream);
  if (zeroed != cudaSuccess || task.m == 0 || task.k == 0) return zeroed;
  const dim3 tiles = swiglu_grid(task);
  return with_activation_types(task, value_dtype, [&](auto value, auto kind, const auto& of) {
    using Value = decltype(value);
    using Kind = typename decltype(kind)::Type;
    swiglu_quantize_by_previous<Value, Kind>
        <<<tiles, kThreads, 0, stream>>>(of, out, previous, maxima);
    const cudaError_t launched = cudaGetLastError();
    if (launched != cudaSuccess) return launched;
    swiglu_finish_by_previous<Value, Kind>
        <<<std::min(tiles.x * tiles.y, kFinishingBlocks), kThreads, 0, stream>>>(of, out, previous,
                                                                                 maxima, tiles);
    return cudaGetLastError();
  });
}

cudaError_t launch_swiglu_quantize(const SwigluTask& task, const SwigluImage& out,
                                   DType value_dtype, cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  return with_activation_types(task, value_dtype, [&](auto value, auto kind, const auto& of) {
    using Value = decltype(value);
    using Kind = typename decltype(kind)::Type;
    const dim3 grid = swiglu_grid(task);
    if (out.amax == nullptr) {
      swiglu_quantize<Value, Kind, true><<<grid, kThreads, 0, stream>>>(of, out);
    } else {
      swiglu_quantize<Value, Kind, false><<<grid, kThreads, 0, stream>>>(of, out);
    }
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
