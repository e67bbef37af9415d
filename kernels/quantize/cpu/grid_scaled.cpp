// Formats whose scales are all in the grid.
#include "kernels/quantize/cpu/quantize_cpu.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/row_kernels.h"
#include "kernels/numerics/float8.h"
#include "kernels/quantize/cpu/row_ranges.h"
#include "kernels/quantize/cpu/with_encoder.h"

namespace qshard::cpu {
namespace {

// Columns [j * width, ...) of block column j.
int64_t block_width(const Layout& layout) {
  return layout.format->scale.block_cols ? layout.format->scale.block_cols : layout.cols;
}

// Calls run(begin, end, first) for the rows [begin, end) of a live range that have scales in
// common, those of the grid's entries from `first` on.
template <typename Run>
void for_each_block_row(const Layout& layout, const RowRange& range, const Run& run) {
  const auto grid_row = [&](int64_t row) {
    return layout.grid_row(range.logical_row + row - range.begin);
  };
  for (int64_t begin = range.begin; begin < range.end;) {
    int64_t end = begin + 1;
    while (end < range.end && grid_row(end) == grid_row(begin)) ++end;
    run(begin, end, grid_row(begin) * layout.grid_cols());
    begin = end;
  }
}

// Writes live rows by the amaxes from `amax` on; `encode` is with_encoder's.
template <typename Encode>
void quantize_rows(const QuantizeTask& task, int64_t begin, int64_t end, const float* amax,
                   const Encode& encode) {
  const Layout& layout = task.layout;
  const Format& format = *layout.format;
  const int64_t row_bytes = layout.row_bytes();
  const int64_t width = block_width(layout);
  std::vector<float> scale(layout.grid_cols());
  for (int64_t j = 0; j < layout.grid_cols(); ++j) {
    scale[j] = scale_from_amax(amax[j], format.code_max, format.scale.power_of_two);
  }
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* x = value_row(task, row);
    uint8_t* codes = task.image + row * row_bytes;
    for (int64_t j = 0; j < layout.grid_cols(); ++j) {
      const int64_t col = j * width;
      encode(x + col * value_size(task.value_dtype), std::min(width, layout.cols - col), scale[j],
             codes + col);
    }
    std::memset(codes + layout.cols, 0, row_bytes - layout.cols);
  }
}

}  // namespace

void compute_amax_of_grid(std::span<const QuantizeTask> tasks) {
  const RowKernels& kernels = row_kernels();
  parallel_over(reset_amax(tasks), [&](const RowRange& range) {
    const QuantizeTask& task = tasks[range.task];
    const Layout& layout = task.layout;
    const auto amax = kernels.amax[static_cast<int>(task.value_dtype)];
    const int64_t width = block_width(layout);
    std::vector<uint32_t> largest(layout.grid_cols());
    for_each_block_row(layout, range, [&](int64_t begin, int64_t end, int64_t first) {
      std::fill(largest.begin(), largest.end(), 0);
      for (int64_t row = begin; row < end; ++row) {
        const uint8_t* x = value_row(task, row);
        for (int64_t j = 0; j < layout.grid_cols(); ++j) {
          const int64_t col = j * width;
          const uint32_t bits =
              amax(x + col * value_size(task.value_dtype), std::min(width, layout.cols - col));
          largest[j] = std::max(largest[j], bits);
        }
      }
      for (int64_t j = 0; j < layout.grid_cols(); ++j) {
        atomic_max(task.amax + first + j, largest[j]);
      }
    });
  });
}

void quantize_by_grid(std::span<const QuantizeTask> tasks) {
  for (const QuantizeTask& task : tasks) {
    const Format& format = *task.layout.format;
    for (int64_t i = 0; i < task.layout.grid_numel(); ++i) {
      task.grid[i] =
          inverse_scale(scale_from_amax(task.amax[i], format.code_max, format.scale.power_of_two));
    }
  }
  parallel_over(rows_to_quantize(tasks), [&](const RowRange& range) {
    const QuantizeTask& task = tasks[range.task];
    if (!range.is_live()) return write_zeros(task, range);
    with_encoder(task, range, task.value_dtype, [&](const auto& encode) {
      for_each_block_row(task.layout, range, [&](int64_t begin, int64_t end, int64_t first) {
        quantize_rows(task, begin, end, task.amax + first, encode);
      });
    });
  });
}

void dequantize_by_grid(std::span<const DequantizeTask> tasks) {
  const RowKernels& kernels = row_kernels();
  parallel_over(rows_to_dequantize(tasks), [&](const RowRange& range) {
    const DequantizeTask& task = tasks[range.task];
    if (!range.is_live()) return write_zeros(task, range);
    const Layout& layout = task.layout;
    const int64_t size = value_size(task.value_dtype);
    auto* values = static_cast<uint8_t*>(task.values);
    const int64_t row_size = layout.cols * size;
    const auto decode = kernels.decode[static_cast<int>(task.value_dtype)];
    const int64_t width = block_width(layout);
    for_each_block_row(layout, range, [&](int64_t begin, int64_t end, int64_t first) {
      const float* scale_inv = task.grid + first;
      for (int64_t row = begin; row < end; ++row) {
        const uint8_t* codes = task.image + row * layout.row_bytes();
        uint8_t* x = values + (row - task.first_row) * row_size;
        for (int64_t j = 0; j < layout.grid_cols(); ++j) {
          const int64_t col = j * width;
          decode(codes + col, std::min(width, layout.cols - col), scale_inv[j], x + col * size);
        }
      }
    });
  });
}

}  // namespace qshard::cpu
