#include <cooperative_groups.h>

#include <algorithm>

#include "kernels/activation/codes.cuh"
#include "kernels/activation/previous_amax.cuh"

namespace qshard::cuda {
namespace {

template <typename Value, typename Code>
__global__ void __launch_bounds__(kTileThreads)
    quantize_tensorwise(const __grid_constant__ ActivationTask task, const float* amax,
                        bool vectorized) {
  using Tile = ActivationTile<Value>;
  __shared__ typename Tile::Shared shared;
  // From the end: that is what the amax pass has left in the L2 cache.
  const int64_t tile_row = static_cast<int64_t>(gridDim.y - 1 - blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  const float scale = scale_from_amax(*amax, Code::kMax, task.power_of_two);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) store_tensor_scale(task, scale);
  Tile tile;
  tile.load(task, tile_row, tile_col, vectorized);
  const bool has_nan = isnan(*amax) || !task.has_own_amax;
  tile.template store_both<Code>(task, tile_row, tile_col, shared, has_nan, scale);
}

/// Makes codes by the previous amax, if there is one, and finds the values' own.
template <typename Value, typename Code>
__global__ void __launch_bounds__(kTileThreads)
    quantize_by_previous(const __grid_constant__ ActivationTask task,
                         const __grid_constant__ PreviousAmax previous, float* amax,
                         bool vectorized) {
  using Tile = ActivationTile<Value>;
  __shared__ typename Tile::Shared shared;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  const bool is_first = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0;
  Tile tile;
  tile.load(task, tile_row, tile_col, vectorized);
  const uint32_t own = largest_of<Value, Tile::kRows>(tile.values);
  if (is_known(previous)) {
    const float scale = scale_from_amax(*previous.amax, Code::kMax, task.power_of_two);
    if (is_first) store_tensor_scale(task, scale);
    tile.template store_both<Code>(task, tile_row, tile_col, shared, is_nan(own), scale);
  }
  // Last: threads meet here.
  const uint32_t largest = max_of_block<kTileThreads>(own);
  if (threadIdx.x == 0) raise(amax, largest);
}

template <typename Value, typename Code>
__global__ void __launch_bounds__(kTileThreads)
    requantize_if_changed(const __grid_constant__ ActivationTask task,
                          const __grid_constant__ PreviousAmax previous, const float* amax,
                          dim3 tiles, bool vectorized) {
  using Tile = ActivationTile<Value>;
  __shared__ typename Tile::Shared shared;
  finish_codes<Code>(task, previous, *amax, tiles, shared, [&](int64_t tile_row, int64_t tile_col) {
    Tile tile;
    tile.load(task, tile_row, tile_col, vectorized);
    return tile;
  });
}

/// Finds the amax and makes codes by it: one launch of few enough CUDA blocks that all run at the
/// same time. `maxima`: room for a word of each.
template <typename Value, typename Code>
__global__ void __launch_bounds__(kTileThreads)
    quantize_at_once(const __grid_constant__ ActivationTask task, float* amax, uint32_t* maxima,
                     dim3 tiles, bool vectorized) {
  using Tile = ActivationTile<Value>;
  __shared__ typename Tile::Shared shared;
  Tile tile;
  const auto load = [&](unsigned i) {
    tile.load(task, static_cast<int64_t>(i / tiles.x) * kTile,
              static_cast<int64_t>(i % tiles.x) * kTile, vectorized);
  };
  uint32_t own = 0;
  unsigned last = blockIdx.x;
  for (unsigned i = blockIdx.x; i < tiles.x * tiles.y; i += gridDim.x) {
    load(i);
    own = max(own, largest_of<Value, Tile::kRows>(tile.values));
    last = i;
  }
  own = max_of_block<kTileThreads>(own);
  if (threadIdx.x == 0) maxima[blockIdx.x] = own;
  cooperative_groups::this_grid().sync();
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kTileThreads)
    own = max(own, __ldcg(maxima + i));
  const float largest = __uint_as_float(canonical_amax(max_of_block<kTileThreads>(own)));
  const float scale = scale_from_amax(largest, Code::kMax, task.power_of_two);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_tensor_scale(task, scale);
    *amax = largest;
  }
  // From the end: that tile is in registers, and those before it are likely in the L2 cache.
  for (unsigned i = last;; i -= gridDim.x) {
    if (i != last) load(i);
    tile.template store_both<Code>(task, static_cast<int64_t>(i / tiles.x) * kTile,
                                   static_cast<int64_t>(i % tiles.x) * kTile, shared,
                                   isnan(largest), scale);
    if (i < gridDim.x) return;
    __syncthreads();  // of `shared`
  }
}

template <typename Run>
cudaError_t with_types(DType value_dtype, DType code_dtype, const Run& run) {
  return with_value_type(value_dtype, [&](auto value) {
    return code_dtype == DType::kFloat8E5M2 ? run(value, E5M2{}) : run(value, E4M3{});
  });
}

}  // namespace

cudaError_t launch_quantize_activation_tensorwise(const ActivationTask& task, const float* amax,
                                                  DType value_dtype, DType code_dtype,
                                                  cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  const bool vectorized = activation_is_vectorized(task, value_dtype);
  return with_types(value_dtype, code_dtype, [&](auto value, auto code) {
    quantize_tensorwise<decltype(value), decltype(code)>
        <<<activation_grid(task), kTileThreads, 0, stream>>>(task, amax, vectorized);
    return cudaGetLastError();
  });
}

bool is_quantized_at_once(const ActivationTask& task, DType value_dtype) {
  const int64_t bytes = task.m * task.k * value_size(value_dtype);
  return bytes > 0 && bytes <= kMostBytesAtOnce;
}

cudaError_t launch_quantize_activation_at_once(const ActivationTask& task, float* amax,
                                               uint32_t* maxima, int blocks, DType value_dtype,
                                               DType code_dtype, cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  bool vectorized = activation_is_vectorized(task, value_dtype);
  dim3 tiles = activation_grid(task);
  return with_types(value_dtype, code_dtype, [&](auto value, auto code) {
    void* arguments[] = {const_cast<ActivationTask*>(&task), &amax, &maxima, &tiles, &vectorized};
    const auto kernel = quantize_at_once<decltype(value), decltype(code)>;
    return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel),
                                       std::min(tiles.x * tiles.y, static_cast<unsigned>(blocks)),
                                       kTileThreads, arguments, 0, stream);
  });
}

cudaError_t launch_quantize_activation_by_previous(const ActivationTask& task,
                                                   const PreviousAmax& previous, float* amax,
                                                   DType value_dtype, DType code_dtype,
                                                   cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  const bool vectorized = activation_is_vectorized(task, value_dtype);
  const dim3 tiles = activation_grid(task);
  const cudaError_t zeroed = cudaMemsetAsync(amax, 0, sizeof(float), stream);
  if (zeroed != cudaSuccess) return zeroed;
  return with_types(value_dtype, code_dtype, [&](auto value, auto code) {
    using Value = decltype(value);
    using Code = decltype(code);
    quantize_by_previous<Value, Code>
        <<<tiles, kTileThreads, 0, stream>>>(task, previous, amax, vectorized);
    const cudaError_t launched = cudaGetLastError();
    if (launched != cudaSuccess) return launched;
    requantize_if_changed<Value, Code>
        <<<std::min(tiles.x * tiles.y, kFinishingBlocks), kTileThreads, 0, stream>>>(
            task, previous, amax, tiles, vectorized);
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
