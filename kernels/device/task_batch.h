// Many tasks in one launch: a batch travels as the kernel's parameter.
#pragma once

#include <cstddef>

namespace qshard::cuda {

/// What a kernel's parameters may take, from CUDA 12.1 and Volta on. A launch copies all of them,
/// so batches for many tasks are types of their own.
constexpr size_t kMaxParameterBytes = 32764;

/// CUDA blocks [first_block[t], first_block[t + 1]) work on tasks[t].
template <typename Task, int kTasks>
struct TaskBatch {
  static constexpr int kCapacity = kTasks;
  int count = 0;
  int first_block[kTasks + 1] = {};
  Task tasks[kTasks];
};

}  // namespace qshard::cuda
