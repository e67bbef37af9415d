// A kernel's side of task_batch.h.
#pragma once

#include <cuda_runtime.h>

#include "kernels/device/task_batch.h"

namespace qshard::cuda {

/// Task of this CUDA block; `block` becomes the block's index within it.
template <typename Task, int kTasks>
__device__ __forceinline__ const Task& find_task(const TaskBatch<Task, kTasks>& batch, int& block) {
  int low = 0;
  int high = batch.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (batch.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  block -= batch.first_block[low];
  return batch.tasks[low];
}

/// Writes entry i of a task's grid, and of its copy if there is one.
template <typename Task>
__device__ __forceinline__ void write_scale_inv(const Task& task, int i, float scale_inv) {
  task.grid[i] = scale_inv;
  if (task.grid_copy != nullptr) task.grid_copy[i] = scale_inv;
}

/// Launches `kernel<<<...>>>(batch)` over all blocks of the batch.
template <int kThreads, typename Kernel, typename Batch>
cudaError_t launch_batch(Kernel kernel, const Batch& batch, cudaStream_t stream) {
  const int blocks = batch.first_block[batch.count];
  if (blocks == 0) return cudaSuccess;
  kernel<<<blocks, kThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace qshard::cuda
