// Launchers of the state kernels; many buffers per launch.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/device/task_batch.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard::cuda {

/// One buffer's state: a CUDA block for each row of its tables, and at least one.
struct ScalingStateTask {
  float* amax;
  float* words;
  float* amax_history;
  float* scaling_amax;
  int32_t* rounding;
  int weight_rows;  // rows with an amax
  int rows;         // all, of activations too
  int history_length;
  int margin;
  float code_max;
  DType value_dtype;
  bool most_recent;
  bool power_of_two;
};

using ScalingStateBatch = TaskBatch<ScalingStateTask, 48>;
static_assert(sizeof(ScalingStateBatch) <= 4096, "kernel parameters are 4 KiB at most");

cudaError_t launch_collect_state(const ScalingStateBatch& batch, cudaStream_t stream);
cudaError_t launch_apply_state(const ScalingStateBatch& batch, FlushKind kind,
                               const float* found_inf, cudaStream_t stream);
cudaError_t launch_delay_amax(float* amax, float* history, const float* scaling, int margin,
                              cudaStream_t stream);

}  // namespace qshard::cuda
