// Codes by a previous amax, which is known before the pass that finds the values' own.
#pragma once

#include "kernels/activation/codes.cuh"
#include "kernels/activation/kernels.h"
#include "kernels/scaling/delayed_scaling.h"

namespace qshard::cuda {

/// Two for each multiprocessor of an H200, of a kernel whose blocks nearly always return at once.
constexpr unsigned kFinishingBlocks = 264;

__device__ __forceinline__ bool is_known(const PreviousAmax& previous) {
  return *previous.amax > 0.f;
}

/// The amax to scale by, now that the values' own is known.
__device__ __forceinline__ float amax_in_use(const PreviousAmax& previous, float own) {
  if (previous.delayed.history == nullptr) return own;
  return is_known(previous) ? *previous.amax : with_margin(own, previous.delayed.margin);
}

/// Whether the codes by the previous amax are final.
__device__ __forceinline__ bool stands(const PreviousAmax& previous, float own, float code_max,
                                       bool power_of_two) {
  return is_known(previous) &&
         scale_from_amax(*previous.amax, code_max, power_of_two) ==
             scale_from_amax(amax_in_use(previous, own), code_max, power_of_two);
}

/// Leaves the values' own for later steps: one thread.
__device__ __forceinline__ void note(const PreviousAmax& previous, float own) {
  const DelayedAmax& delayed = previous.delayed;
  if (delayed.history != nullptr) {
    delayed_amax(own, delayed.history, delayed.scaling, delayed.margin);
  } else {
    *previous.next = own;
  }
}

/// Notes the values' own amax; makes codes by it unless those by the previous one stand. A CUDA
/// block takes `tiles`, those of the matrix, in turn; values_of(tile_row, tile_col): an
/// ActivationTile.
template <typename Code, typename Shared, typename Values>
__device__ __forceinline__ void finish_codes(const ActivationTask& task,
                                             const PreviousAmax& previous, float own, dim3 tiles,
                                             Shared& shared, const Values& values_of) {
  const bool is_first = blockIdx.x == 0 && threadIdx.x == 0;
  if (is_first) note(previous, own);
  if (stands(previous, own, Code::kMax, task.power_of_two)) return;
  const float scale = scale_from_amax(amax_in_use(previous, own), Code::kMax, task.power_of_two);
  if (is_first) store_tensor_scale(task, scale);
  for (uint32_t i = blockIdx.x; i < tiles.x * tiles.y; i += gridDim.x) {
    const int64_t tile_row = static_cast<int64_t>(i / tiles.x) * kTile;
    const int64_t tile_col = static_cast<int64_t>(i % tiles.x) * kTile;
    const auto tile = values_of(tile_row, tile_col);
    tile.template store_both<Code>(task, tile_row, tile_col, shared, isnan(own), scale);
    __syncthreads();  // of `shared`
  }
}

}  // namespace qshard::cuda
