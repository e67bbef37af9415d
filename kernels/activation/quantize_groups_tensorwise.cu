#include "kernels/activation/codes.cuh"
#include "kernels/scaling/delayed_scaling.h"

namespace qshard::cuda {
namespace {

constexpr int kScaleThreads = 256;

/// The task of one group's tile: what it reads and writes ends with the group. Columns of codes_t
/// begin elsewhere than its rows.
__device__ __forceinline__ ActivationTask task_of(const ActivationTask& task,
                                                  const RowTile& place) {
  ActivationTask group = task;
  group.m = place.end;
  group.rows_written = place.end;
  if (task.codes_t != nullptr) group.codes_t = task.codes_t + (place.column - place.row);
  return group;
}

template <typename Value>
__global__ void __launch_bounds__(kTileThreads)
    find_group_amaxes(const __grid_constant__ ActivationTask task, const RowTile* tiles,
                      float* amax, bool vectorized) {
  using Tile = ActivationTile<Value>;
  const RowTile place = tiles[blockIdx.y];
  if (place.row < 0) return;
  Tile tile;
  tile.load(task_of(task, place), place.row, static_cast<int64_t>(blockIdx.x) * kTile, vectorized);
  const uint32_t own = largest_of<Value, Tile::kRows>(tile.values);
  const uint32_t largest = max_of_block<kTileThreads>(own);
  if (threadIdx.x == 0) raise(amax + place.group, largest);
}

/// By one CUDA block.
__global__ void __launch_bounds__(kScaleThreads)
    find_group_scales(const __grid_constant__ GroupScales scales, float code_max, bool power_of_two,
                      float* scale_inv, float* scale_inv_t) {
  const DelayedAmax& delayed = scales.delayed;
  uint32_t largest = 0;
  for (int64_t group = threadIdx.x; group < scales.groups; group += kScaleThreads) {
    const float own = scales.amax[group];
    float in_use = own;
    if (delayed.history != nullptr) {
      if (is_finite_amax(own)) largest = max(largest, __float_as_uint(own));
      const float earlier = delayed.scaling[kInUse];
      in_use = earlier > 0.f ? earlier : with_margin(own, delayed.margin);
    }
    const float scale = scale_from_amax(in_use, code_max, power_of_two);
    scales.scale[group] = scale;
    if (scale_inv != nullptr) scale_inv[group] = inverse_scale(scale);
    if (scale_inv_t != nullptr) scale_inv_t[group] = inverse_scale(scale);
  }
  if (delayed.history == nullptr) return;
  largest = max_of_block<kScaleThreads>(largest);
  if (threadIdx.x == 0) {
    delayed_amax(__uint_as_float(largest), delayed.history, delayed.scaling, delayed.margin);
  }
}

template <typename Value, typename Code>
__global__ void __launch_bounds__(kTileThreads)
    quantize_groups_tensorwise(const __grid_constant__ ActivationTask task, const RowTile* tiles,
                               const float* amax, const float* scales, bool vectorized) {
  using Tile = ActivationTile<Value>;
  __shared__ typename Tile::Shared shared;
  const RowTile place = tiles[blockIdx.y];
  if (place.row < 0) return;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  const ActivationTask group = task_of(task, place);
  Tile tile;
  tile.load(group, place.row, tile_col, vectorized);
  tile.template store_both<Code>(group, place.row, tile_col, shared, isnan(amax[place.group]),
                                 scales[place.group]);
}

}  // namespace

cudaError_t launch_quantize_groups_tensorwise(const ActivationTask& task, const RowTile* tiles,
                                              int64_t count, const GroupScales& scales,
                                              DType value_dtype, DType code_dtype,
                                              cudaStream_t stream) {
  if (scales.groups == 0) return cudaSuccess;
  const cudaError_t zeroed =
      cudaMemsetAsync(scales.amax, 0, static_cast<size_t>(scales.groups) * sizeof(float), stream);
  if (zeroed != cudaSuccess) return zeroed;
  const bool has_rows = task.m != 0 && task.k != 0 && count != 0;
  const bool vectorized = activation_is_vectorized(task, value_dtype);
  const dim3 grid(activation_grid(task).x, static_cast<unsigned>(count));
  return with_value_type(value_dtype, [&](auto value) {
    using Value = decltype(value);
    if (has_rows) {
      find_group_amaxes<Value>
          <<<grid, kTileThreads, 0, stream>>>(task, tiles, scales.amax, vectorized);
    }
    const bool is_wide = code_dtype == DType::kFloat8E5M2;
    find_group_scales<<<1, kScaleThreads, 0, stream>>>(
        scales, is_wide ? E5M2::kMax : E4M3::kMax, task.power_of_two,
        task.codes != nullptr ? task.scale_inv : nullptr,
        task.codes_t != nullptr ? task.scale_inv_t : nullptr);
    if (has_rows && is_wide) {
      quantize_groups_tensorwise<Value, E5M2>
          <<<grid, kTileThreads, 0, stream>>>(task, tiles, scales.amax, scales.scale, vectorized);
    } else if (has_rows) {
      quantize_groups_tensorwise<Value, E4M3>
          <<<grid, kTileThreads, 0, stream>>>(task, tiles, scales.amax, scales.scale, vectorized);
    }
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
