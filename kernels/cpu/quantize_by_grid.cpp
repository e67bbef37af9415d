// Formats whose scales are all in the grid.
#include "kernels/cpu/quantize_cpu.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/row_ranges.h"
#include "kernels/float8.h"

namespace qshard::cpu {
namespace {

// Columns [j * width, ...) of block column j.
int64_t block_width(const Layout& layout) {
  return layout.format->block_cols ? layout.format->block_cols : layout.cols;
}

const uint8_t* value_row(const QuantizeTask& task, int64_t row) {
  return static_cast<const uint8_t*>(task.values) +
         row * task.layout.cols * value_size(task.value_dtype);
}

}  // namespace

void compute_amax_of_grid(std::span<const QuantizeTask> tasks) {
  std::vector<RowRange> ranges;
  int64_t elements = 0;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const Layout& layout = tasks[t].layout;
    if (layout.grid_numel() == 0) continue;
    std::memset(tasks[t].amax, 0, layout.grid_numel() * sizeof(float));
    const int64_t live = layout.live_rows();
    append_ranges(ranges, t, layout, layout.row_offset, 0, live, live);
    elements += live * layout.cols;
  }
  const RowKernels& kernels = row_kernels();
  parallel_over(ranges, elements, [&](const RowRange& range) {
    const QuantizeTask& task = tasks[range.task];
    const Layout& layout = task.layout;
    const auto amax = kernels.amax[static_cast<int>(task.value_dtype)];
    const int64_t width = block_width(layout);
    std::vector<uint32_t> largest(layout.grid_cols(), 0);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const uint8_t* x = value_row(task, row);
      for (int64_t j = 0; j < layout.grid_cols(); ++j) {
        const int64_t col = j * width;
        const uint32_t bits =
            amax(x + col * value_size(task.value_dtype), std::min(width, layout.cols - col));
        largest[j] = std::max(largest[j], bits);
      }
    }
    float* out = task.amax + layout.grid_row(range.logical_row) * layout.grid_cols();
    for (int64_t j = 0; j < layout.grid_cols(); ++j) atomic_max(out + j, largest[j]);
  });
}

void quantize_by_grid(std::span<const QuantizeTask> tasks) {
  std::vector<RowRange> ranges;
  int64_t elements = 0;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const Layout& layout = tasks[t].layout;
    const Format& format = *layout.format;
    for (int64_t i = 0; i < layout.grid_numel(); ++i) {
      tasks[t].grid[i] = inverse_scale(
          scale_from_amax(tasks[t].amax[i], format.code_max, format.power_of_two_scales));
    }
    if (layout.cols == 0) continue;
    append_ranges(ranges, t, layout, layout.row_offset, 0, layout.rows, layout.live_rows());
    elements += layout.rows * layout.cols;
  }
  const RowKernels& kernels = row_kernels();
  parallel_over(ranges, elements, [&](const RowRange& range) {
    const QuantizeTask& task = tasks[range.task];
    const Layout& layout = task.layout;
    const Format& format = *layout.format;
    const int64_t row_bytes = layout.row_bytes();
    if (!range.is_live()) {
      std::memset(task.image + range.begin * row_bytes, 0, (range.end - range.begin) * row_bytes);
      return;
    }
    const auto encode = kernels.encode[static_cast<int>(task.value_dtype)];
    const int64_t width = block_width(layout);
    const float* amax = task.amax + layout.grid_row(range.logical_row) * layout.grid_cols();
    std::vector<float> scale(layout.grid_cols());
    for (int64_t j = 0; j < layout.grid_cols(); ++j) {
      scale[j] = scale_from_amax(amax[j], format.code_max, format.power_of_two_scales);
    }
    for (int64_t row = range.begin; row < range.end; ++row) {
      const uint8_t* x = value_row(task, row);
      uint8_t* codes = task.image + row * row_bytes;
      for (int64_t j = 0; j < layout.grid_cols(); ++j) {
        const int64_t col = j * width;
        encode(x + col * value_size(task.value_dtype), std::min(width, layout.cols - col), scale[j],
               codes + col);
      }
      std::memset(codes + layout.cols, 0, row_bytes - layout.cols);
    }
  });
}

void dequantize_by_grid(std::span<const DequantizeTask> tasks) {
  std::vector<RowRange> ranges;
  int64_t elements = 0;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const Layout& layout = tasks[t].layout;
    if (layout.cols == 0) continue;
    const int64_t offset = layout.row_offset == Layout::kOpen ? 0 : layout.row_offset;
    const int64_t end = tasks[t].first_row + tasks[t].rows;
    append_ranges(ranges, t, layout, offset, tasks[t].first_row, end, layout.logical_rows - offset);
    elements += tasks[t].rows * layout.cols;
  }
  const RowKernels& kernels = row_kernels();
  parallel_over(ranges, elements, [&](const RowRange& range) {
    const DequantizeTask& task = tasks[range.task];
    const Layout& layout = task.layout;
    const int64_t size = value_size(task.value_dtype);
    auto* values = static_cast<uint8_t*>(task.values);
    const int64_t row_size = layout.cols * size;
    if (!range.is_live()) {
      std::memset(values + (range.begin - task.first_row) * row_size, 0,
                  (range.end - range.begin) * row_size);
      return;
    }
    const auto decode = kernels.decode[static_cast<int>(task.value_dtype)];
    const int64_t width = block_width(layout);
    const float* scale_inv = task.grid + layout.grid_row(range.logical_row) * layout.grid_cols();
    for (int64_t row = range.begin; row < range.end; ++row) {
      const uint8_t* codes = task.image + row * layout.row_bytes();
      uint8_t* x = values + (row - task.first_row) * row_size;
      for (int64_t j = 0; j < layout.grid_cols(); ++j) {
        const int64_t col = j * width;
        decode(codes + col, std::min(width, layout.cols - col), scale_inv[j], x + col * size);
      }
    }
  });
}

}  // namespace qshard::cpu
