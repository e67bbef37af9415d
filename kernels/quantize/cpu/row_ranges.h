// The CPU kernels' unit of work: some rows of one task, all of one matrix.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/format/quantize_tasks.h"

namespace qshard::cpu {

/// Rows [begin, end) of one task; none crosses a multiple of kRows rows of its matrix. That is
/// where a scale block ends whose rows divide kRows: a range has one of them, or several.
struct RowRange {
  static constexpr int64_t kRows = 128;
  static constexpr int64_t kNotLive = -1;

  size_t task;
  int64_t begin;
  int64_t end;
  int64_t logical_row;  // of row `begin`; kNotLive: rows outside the logical tensor

  bool is_live() const { return logical_row != kNotLive; }
};

/// The rows of some tasks, cut into ranges.
struct RowWork {
  std::vector<RowRange> ranges;
  int64_t elements = 0;
};

/// Zeroes the tasks' amaxes; returns the live rows of those that have any.
RowWork reset_amax(std::span<const QuantizeTask> tasks);
/// All rows.
RowWork rows_to_quantize(std::span<const QuantizeTask> tasks);
/// The rows asked for; those of an open placement as if row_offset were 0.
RowWork rows_to_dequantize(std::span<const DequantizeTask> tasks);

inline const uint8_t* value_row(const QuantizeTask& task, int64_t row) {
  return static_cast<const uint8_t*>(task.values) +
         row * task.layout.cols * value_size(task.value_dtype);
}

/// What rows outside the logical tensor hold.
inline void write_zeros(const QuantizeTask& task, const RowRange& range) {
  for (int64_t row = range.begin; row < range.end; ++row) {
    std::memset(task.image + row * task.layout.row_bytes(), 0, task.layout.image_row_bytes());
  }
}
inline void write_zeros(const DequantizeTask& task, const RowRange& range) {
  const int64_t row_size = task.layout.cols * value_size(task.value_dtype);
  std::memset(static_cast<uint8_t*>(task.values) + (range.begin - task.first_row) * row_size, 0,
              (range.end - range.begin) * row_size);
}

/// Calls run(range) for every range, on several threads if there are enough elements.
template <typename Function>
void parallel_over(const RowWork& work, const Function& run) {
  constexpr int64_t kSerialElements = 32768;  // below, starting threads costs more than it saves
  const auto& ranges = work.ranges;
  const auto count = static_cast<int64_t>(ranges.size());
  if (work.elements <= kSerialElements || count == 1) {
    for (const RowRange& range : ranges) run(range);
    return;
  }
  // Ranges of different tensors differ in size, so threads take the next one as they finish.
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(count, at::get_num_threads());
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) run(ranges[i]);
  });
}

inline void atomic_max(float* target, uint32_t bits) {
  std::atomic_ref<uint32_t> entry(*reinterpret_cast<uint32_t*>(target));
  uint32_t current = entry.load(std::memory_order_relaxed);
  while (current < bits && !entry.compare_exchange_weak(current, bits, std::memory_order_relaxed)) {
  }
}

}  // namespace qshard::cpu
