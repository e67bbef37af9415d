// Many tasks in one launch: a batch travels as the kernel's parameter.
#pragma once

namespace qshard::cuda {

/// CUDA blocks [first_block[t], first_block[t + 1]) work on tasks[t].
template <typename Task, int kTasks>
struct TaskBatch {
  static constexpr int kCapacity = kTasks;
  int count = 0;
  int first_block[kTasks + 1] = {};
  Task tasks[kTasks];
};

}  // namespace qshard::cuda
