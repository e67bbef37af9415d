#include "kernels/quantize/cpu/row_ranges.h"

namespace qshard::cpu {
namespace {

// Appends the rows [begin, end) of a layout; rows from `live` on are outside the logical tensor,
// whose row 0 is `row_offset` rows up.
void append(RowWork& work, size_t task, const Layout& layout, int64_t row_offset, int64_t begin,
            int64_t end, int64_t live) {
  work.elements += (end - begin) * layout.cols;
  for (int64_t row = begin; row < end;) {
    if (row >= live) {
      const int64_t next = std::min(row + RowRange::kRows, end);
      work.ranges.push_back({task, row, next, RowRange::kNotLive});
      row = next;
      continue;
    }
    const int64_t logical = row_offset + row;
    const int64_t in_matrix = logical % layout.matrix_rows;
    const int64_t left =
        std::min(layout.matrix_rows - in_matrix, RowRange::kRows - in_matrix % RowRange::kRows);
    const int64_t next = row + std::min(left, std::min(end, live) - row);
    work.ranges.push_back({task, row, next, logical});
    row = next;
  }
}

}  // namespace

RowWork reset_amax(std::span<const QuantizeTask> tasks) {
  RowWork work;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const Layout& layout = tasks[t].layout;
    const int64_t numel = amax_numel(layout, tasks[t].boundary);
    if (numel == 0) continue;
    std::memset(tasks[t].amax, 0, numel * sizeof(float));
    const int64_t live = layout.live_rows();
    append(work, t, layout, layout.row_offset, 0, live, live);
  }
  return work;
}

RowWork rows_to_quantize(std::span<const QuantizeTask> tasks) {
  RowWork work;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const Layout& layout = tasks[t].layout;
    if (layout.cols == 0) continue;
    append(work, t, layout, layout.row_offset, 0, layout.rows, layout.live_rows());
  }
  return work;
}

RowWork rows_to_dequantize(std::span<const DequantizeTask> tasks) {
  RowWork work;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const Layout& layout = tasks[t].layout;
    if (layout.cols == 0) continue;
    const int64_t offset = layout.row_offset;
    const int64_t begin = tasks[t].first_row;
    append(work, t, layout, offset, begin, begin + tasks[t].rows, layout.logical_rows - offset);
  }
  return work;
}

}  // namespace qshard::cpu
