// The state of delayed scaling and of stochastic rounding: small tables, one CUDA block per row.
#include "kernels/device/task_batch.cuh"
#include "kernels/scaling/delayed_scaling.h"
#include "kernels/scaling/scaling_state_kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kStateThreads = 128;

__global__ void __launch_bounds__(kStateThreads)
    collect(const __grid_constant__ ScalingStateBatch batch) {
  int block = static_cast<int>(blockIdx.x);
  const ScalingStateTask& task = find_task(batch, block);
  if (threadIdx.x != 0) return;
  float* words = task.words;
  for (int row = task.rows - kActivationRows; row >= 0 && row < task.rows; ++row) {
    *words++ = task.amax_history[static_cast<int64_t>(row) * task.history_length];
  }
  if (task.rounding == nullptr) return;
  for (int i = 0; i < kRoundingWords; ++i) words[i] = __int_as_float(task.rounding[i]);
}

/// Largest entry of a row, to all threads. Entries are finite and not negative.
__device__ __forceinline__ float largest_of(const float* history, int length) {
  __shared__ uint32_t of_warp[kStateThreads / 32];
  uint32_t largest = 0;
  for (int i = static_cast<int>(threadIdx.x); i < length; i += kStateThreads) {
    largest = max(largest, __float_as_uint(history[i]));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int i = 0; i < kStateThreads / 32; ++i) largest = max(largest, of_warp[i]);
  return __uint_as_float(largest);
}

/// Drops the oldest entry; `newest` goes to the end, 0 to slot 0.
__device__ __forceinline__ void roll(float* history, int length, float newest) {
  for (int first = 0; first < length; first += kStateThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const float next = i + 1 < length ? history[i + 1] : newest;
    __syncthreads();
    if (i < length) history[i] = i == 0 ? 0.f : next;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kStateThreads)
    apply(const __grid_constant__ ScalingStateBatch batch, FlushKind kind, const float* found_inf) {
  int row = static_cast<int>(blockIdx.x);
  const ScalingStateTask& task = find_task(batch, row);
  const bool is_step = kind == FlushKind::kStep && !(found_inf != nullptr && *found_inf != 0.f);
  if (row == 0 && task.rounding != nullptr && threadIdx.x < kRoundingWords) {
    const float* words = task.words + (task.rows > 0 ? kActivationRows : 0);
    const int i = static_cast<int>(threadIdx.x);
    const bool counts = is_step && i == kRoundingWords - 1;
    task.rounding[i] = __float_as_int(words[i]) + (counts ? 1 : 0);
  }
  const int activation = row - (task.rows - static_cast<int>(kActivationRows));
  const bool is_weight = row < task.weight_rows;
  if (row >= task.rows || (!is_weight && (activation < 0 || !is_step))) return;

  float* scaling = task.scaling_amax + static_cast<int64_t>(row) * kScalingAmaxes;
  if (!is_step) {
    if (threadIdx.x == 0) {
      task.amax[row] = refresh_weight(task.amax[row], scaling, task.code_max, task.power_of_two,
                                      task.margin, task.value_dtype);
    }
    return;
  }
  float* history = task.amax_history + static_cast<int64_t>(row) * task.history_length;
  const float amax = is_weight ? task.amax[row] : task.words[activation];
  const float newest = is_finite_amax(amax) ? amax : 0.f;
  if (threadIdx.x == 0) history[0] = newest;
  __syncthreads();
  const float largest = task.most_recent ? newest : largest_of(history, task.history_length);
  __syncthreads();
  if (threadIdx.x == 0) {
    if (is_weight) {
      task.amax[row] = step_weight(amax, largest, scaling, task.margin);
    } else {
      step_activation(largest, scaling, task.margin);
    }
  }
  roll(history, task.history_length, newest);
}

__global__ void delay(float* amax, float* history, const float* scaling, int margin) {
  *amax = delayed_amax(*amax, history, scaling, margin);
}

}  // namespace

cudaError_t launch_collect_state(const ScalingStateBatch& batch, cudaStream_t stream) {
  return launch_batch<kStateThreads>(collect, batch, stream);
}

cudaError_t launch_apply_state(const ScalingStateBatch& batch, FlushKind kind,
                               const float* found_inf, cudaStream_t stream) {
  const int blocks = batch.first_block[batch.count];
  apply<<<blocks, kStateThreads, 0, stream>>>(batch, kind, found_inf);
  return cudaGetLastError();
}

cudaError_t launch_delay_amax(float* amax, float* history, const float* scaling, int margin,
                              cudaStream_t stream) {
  delay<<<1, 1, 0, stream>>>(amax, history, scaling, margin);
  return cudaGetLastError();
}

}  // namespace qshard::cuda
