// Packs tasks into as few launches as possible.
#pragma once

#include <limits>
#include <span>

#include "kernels/device/check_launch.h"
#include "kernels/format/formats.h"

namespace qshard::cuda {

/// Hands full batches, and at flush() the rest, to launch(batch), which returns a cudaError_t.
/// A Batch is a TaskBatch.
template <typename Batch, typename Launch>
class Batcher {
 public:
  explicit Batcher(const Launch& launch) : launch_(launch) {}

  template <typename Task>
  void add(const Task& task, int blocks) {
    if (blocks == 0) return;
    if (batch_.count == Batch::kCapacity ||
        batch_.first_block[batch_.count] > std::numeric_limits<int>::max() - blocks) {
      flush();
    }
    batch_.tasks[batch_.count] = task;
    batch_.first_block[batch_.count + 1] = batch_.first_block[batch_.count] + blocks;
    ++batch_.count;
  }

  void flush() {
    if (batch_.count > 0) check_launch(launch_(batch_));
    batch_.count = 0;
  }

 private:
  Batch batch_;
  Launch launch_;
};

template <typename Batch, typename Launch>
Batcher<Batch, Launch> make_batcher(const Launch& launch) {
  return Batcher<Batch, Launch>(launch);
}

/// One launch sequence per value type: a batch holds one type. Calls add(batcher, task) for each
/// task whose layout it takes(layout), and launch(batch, type) for what was added.
template <typename Batch, typename Task, typename Takes, typename Launch, typename Add>
void launch_by_type(std::span<const Task> tasks, const Takes& takes, const Launch& launch,
                    const Add& add) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    auto batcher = make_batcher<Batch>([&](const Batch& batch) { return launch(batch, dtype); });
    for (const Task& task : tasks) {
      if (task.value_dtype == dtype && takes(task.layout)) add(batcher, task);
    }
    batcher.flush();
  }
}

}  // namespace qshard::cuda
