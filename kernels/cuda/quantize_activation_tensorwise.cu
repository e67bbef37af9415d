#include "kernels/cuda/activation_codes.cuh"

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
  store_tensorwise<Code>(tile, task, scale, tile_row, tile_col, shared);
}

}  // namespace

cudaError_t launch_quantize_activation_tensorwise(const ActivationTask& task, const float* amax,
                                                  DType value_dtype, DType code_dtype,
                                                  cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  const bool vectorized = activation_is_vectorized(task, value_dtype);
  return with_value_type(value_dtype, [&](auto value) {
    using Value = decltype(value);
    if (code_dtype == DType::kFloat8E5M2) {
      quantize_tensorwise<Value, E5M2>
          <<<activation_grid(task), kTileThreads, 0, stream>>>(task, amax, vectorized);
    } else {
      quantize_tensorwise<Value, E4M3>
          <<<activation_grid(task), kTileThreads, 0, stream>>>(task, amax, vectorized);
    }
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
