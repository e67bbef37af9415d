// The CPU kernels' unit of work: some rows of one task, all of one matrix.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/layout.h"

namespace qshard::cpu {

inline int64_t value_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// Rows [begin, end) of one task; none crosses a multiple of kRows rows of its matrix, and so no
/// scale block of any format that divides it.
struct RowRange {
  static constexpr int64_t kRows = 128;
  static constexpr int64_t kNotLive = -1;

  size_t task;
  int64_t begin;
  int64_t end;
  int64_t logical_row;  // of row `begin`; kNotLive: rows outside the logical tensor

  bool is_live() const { return logical_row != kNotLive; }
};

/// Cuts the rows [begin, end) of a layout; rows from `live` on are outside the logical tensor,
/// whose row 0 is `row_offset` rows up.
inline void append_ranges(std::vector<RowRange>& ranges, size_t task, const Layout& layout,
                          int64_t row_offset, int64_t begin, int64_t end, int64_t live) {
  for (int64_t row = begin; row < end;) {
    if (row >= live) {
      const int64_t next = std::min(row + RowRange::kRows, end);
      ranges.push_back({task, row, next, RowRange::kNotLive});
      row = next;
      continue;
    }
    const int64_t logical = row_offset + row;
    const int64_t in_matrix = logical % layout.matrix_rows;
    const int64_t left =
        std::min(layout.matrix_rows - in_matrix, RowRange::kRows - in_matrix % RowRange::kRows);
    const int64_t next = row + std::min(left, std::min(end, live) - row);
    ranges.push_back({task, row, next, logical});
    row = next;
  }
}

/// Calls run(range) for every range, on several threads if there are enough elements.
template <typename Function>
void parallel_over(const std::vector<RowRange>& ranges, int64_t elements, const Function& run) {
  constexpr int64_t kSerialElements = 32768;  // below, starting threads costs more than it saves
  const auto count = static_cast<int64_t>(ranges.size());
  if (elements <= kSerialElements || count == 1) {
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
