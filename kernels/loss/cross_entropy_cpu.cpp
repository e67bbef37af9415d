#include "kernels/loss/cross_entropy_cpu.h"

#include <ATen/Parallel.h>

#include <array>

#include "kernels/cpu/values.h"

namespace qshard::cpu {
namespace {

constexpr int64_t kRowsAtOnce = 1;

/// merged(i, i + 128), then i + 64, and so on: what one lane is left with.
template <typename T, typename Merged>
T merge_lanes(std::array<T, kSoftmaxLanes>& lanes, const Merged& merged) {
  for (int apart = kSoftmaxLanes / 2; apart > 0; apart /= 2) {
    for (int i = 0; i < apart; ++i) lanes[i] = merged(lanes[i], lanes[i + apart]);
  }
  return lanes[0];
}

LogitSums sums_of_row(const CrossEntropyTask& task, int64_t row, DType dtype) {
  std::array<LogitSums, kSoftmaxLanes> lanes;
  lanes.fill(kNoLogits);
  const bool sums_logits = task.smoothing.smoothing != 0.f;
  for (int64_t begin = 0; begin < task.v; begin += kSoftmaxChunk) {
    float x[kSoftmaxChunk], present[kSoftmaxChunk];
    for (int i = 0; i < kSoftmaxChunk; ++i) {
      const bool is_there = begin + i < task.v;
      x[i] = is_there ? load_value(task.logits, dtype, row * task.v + begin + i) : -INFINITY;
      present[i] = is_there ? x[i] : 0.f;
    }
    lanes[begin / kSoftmaxChunk % kSoftmaxLanes].add(x, present, sums_logits);
  }
  return merge_lanes(lanes, LogitSums::merged);
}

template <typename Run>
void for_each_row(const CrossEntropyTask& task, const Run& run) {
  at::parallel_for(0, task.m, kRowsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) run(row);
  });
}

}  // namespace

void cross_entropy_losses(const CrossEntropyTask& task, DType dtype) {
  for_each_row(task, [&](int64_t row) {
    const LogitSums sums = sums_of_row(task, row, dtype);
    const int64_t target = task.targets[row];
    task.log_sums[row] = sums.log_sum();
    task.losses[row] =
        target == task.ignored
            ? 0.f
            : task.smoothing.loss(sums.log_sum(),
                                  load_value(task.logits, dtype, row * task.v + target),
                                  sums.logits, static_cast<float>(task.v));
  });
  std::array<float, kSoftmaxLanes> losses = {};
  int64_t count = 0;
  for (int64_t row = 0; row < task.m; ++row) {
    losses[row % kSoftmaxLanes] += task.losses[row];
    count += task.targets[row] != task.ignored;
  }
  task.totals[0] = canonical_nan(merge_lanes(losses, [](float a, float b) { return a + b; }));
  task.totals[1] = static_cast<float>(count);
}

void cross_entropy_gradient(const CrossEntropyTask& task, DType dtype, void* values) {
  for_each_row(task, [&](int64_t row) {
    const int64_t target = task.targets[row];
    for (int64_t c = 0; c < task.v; ++c) {
      const int64_t i = row * task.v + c;
      const float x = target == task.ignored
                          ? 0.f
                          : task.smoothing.gradient(load_value(task.logits, dtype, i),
                                                    task.log_sums[row], c == target);
      store_value(values, dtype, i, x);
    }
  });
}

}  // namespace qshard::cpu
