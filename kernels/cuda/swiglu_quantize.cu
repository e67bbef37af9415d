#include "kernels/cuda/activation_codes.cuh"
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/swiglu.cuh"

namespace qshard::cuda {
namespace {

// Two tiles of 16-bit values are 32 registers of a thread, and two CUDA blocks fit at once.
constexpr int kThreads = 512;

template <typename Value, bool kVectorized>
struct SwigluTile {
  using Tile = ActivationTile<Value, kThreads>;
  Tile product, up;

  __device__ SwigluTile(const SwigluTask& task, int64_t tile_row, int64_t tile_col) {
    product.load(task.gate, task.m, task.k, task.ld_gate, tile_row, tile_col, kVectorized);
    up.load(task.up, task.m, task.k, task.ld_up, tile_row, tile_col, kVectorized);
  }
  template <typename Seen>
  __device__ __forceinline__ void multiply(const Seen& seen) {
    swiglu(product, up, seen);
  }
  __device__ __forceinline__ void multiply() {
    multiply([](uint32_t) {});
  }
};

template <typename Value, bool kVectorized>
__global__ void __launch_bounds__(kThreads)
    swiglu_amax(const __grid_constant__ SwigluTask task, float* maxima) {
  SwigluTile<Value, kVectorized> tile(task, static_cast<int64_t>(blockIdx.y) * kTile,
                                      static_cast<int64_t>(blockIdx.x) * kTile);
  constexpr int kRows = decltype(tile)::Tile::kRows;
  const uint32_t up = __reduce_max_sync(kWholeWarp, largest_of<Value, kRows>(tile.up.values));
  uint32_t largest = 0;
  tile.multiply([&](uint32_t word) { largest = Value::max(largest, Value::magnitudes(word)); });
  const StripMaxima strip = {__reduce_max_sync(kWholeWarp, Value::amax_bits(largest)), up};
  if (threadIdx.x % 32 == 0) strip.store<kThreads>(maxima);
  const uint32_t amax = max_of_block<kThreads>(largest_of<Value, kRows>(tile.product.values));
  if (threadIdx.x == 0) raise(maxima, amax);
}

template <typename Value, bool kVectorized, bool kBlocks>
__global__ void __launch_bounds__(kThreads)
    swiglu_quantize(const __grid_constant__ SwigluTask task,
                    const __grid_constant__ SwigluImage out) {
  __shared__ typename ActivationTile<Value, kThreads>::Shared shared;
  // From the end: that is what the amax pass has left in the L2 cache.
  const int64_t tile_row = static_cast<int64_t>(gridDim.y - 1 - blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  SwigluTile<Value, kVectorized> values(task, tile_row, tile_col);
  values.multiply();
  const auto& tile = values.product;
  if constexpr (kBlocks) {
    store_in_blocks(tile, out.task, tile_row, tile_col, shared);
  } else {
    const float scale = scale_from_amax(*out.amax, kE4M3Max, out.task.power_of_two);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) store_tensor_scale(out.task, scale);
    tile.template store_both<E4M3>(out.task, tile_row, tile_col, shared, isnan(*out.amax), scale);
  }
}

}  // namespace

cudaError_t launch_swiglu_maxima(const SwigluTask& task, float* maxima, DType value_dtype,
                                 cudaStream_t stream) {
  const cudaError_t zeroed = cudaMemsetAsync(maxima, 0, sizeof(float), stream);
  if (zeroed != cudaSuccess || task.m == 0 || task.k == 0) return zeroed;
  return with_swiglu_types(task, value_dtype, [&](auto value, auto vectorized) {
    swiglu_amax<decltype(value), vectorized()>
        <<<swiglu_grid(task), kThreads, 0, stream>>>(task, maxima);
    return cudaGetLastError();
  });
}

cudaError_t launch_swiglu_quantize(const SwigluTask& task, const SwigluImage& out,
                                   DType value_dtype, cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  return with_swiglu_types(task, value_dtype, [&](auto value, auto vectorized) {
    using Value = decltype(value);
    const dim3 grid = swiglu_grid(task);
    if (out.amax == nullptr) {
      swiglu_quantize<Value, vectorized(), true><<<grid, kThreads, 0, stream>>>(task, out);
    } else {
      swiglu_quantize<Value, vectorized(), false><<<grid, kThreads, 0, stream>>>(task, out);
    }
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
