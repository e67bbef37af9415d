// Codes by an amax that was known before the pass which finds the values' own.
#pragma once

#include "kernels/cuda/activation_kernels.h"
#include "kernels/delayed_scaling.h"

namespace qshard::cuda {

/// Two for each multiprocessor of an H200, of a kernel whose blocks nearly always return at once.
constexpr unsigned kFinishingBlocks = 264;

__device__ __forceinline__ bool is_known(const EarlierAmax& earlier) { return *earlier.amax > 0.f; }

/// The amax to scale by, now that the values' own is known.
__device__ __forceinline__ float amax_in_use(const EarlierAmax& earlier, float own) {
  if (earlier.delayed.history == nullptr) return own;
  return is_known(earlier) ? *earlier.amax : with_margin(own, earlier.delayed.margin);
}

/// Whether the codes by the earlier amax are final.
__device__ __forceinline__ bool stands(const EarlierAmax& earlier, float own, float code_max,
                                       bool power_of_two) {
  return is_known(earlier) &&
         scale_from_amax(*earlier.amax, code_max, power_of_two) ==
             scale_from_amax(amax_in_use(earlier, own), code_max, power_of_two);
}

/// Leaves the values' own for later steps: one thread.
__device__ __forceinline__ void note(const EarlierAmax& earlier, float own) {
  const DelayedAmax& delayed = earlier.delayed;
  if (delayed.history != nullptr) {
    delayed_amax(own, delayed.history, delayed.scaling, delayed.margin);
  } else {
    *earlier.next = own;
  }
}

}  // namespace qshard::cuda
