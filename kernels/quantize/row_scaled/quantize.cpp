#include "kernels/quantize/row_scaled/quantize.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/quantize/row_scaled/tasks.h"

namespace qshard::cuda {
namespace {

// Rows [first_row, first_row + rows) of a task, whose row 0 is logical row `offset`.
struct Window {
  int64_t offset;
  int64_t first_row;
  int64_t rows;
};

// Describes a window of `values`, itself a shard of its own; tiles have `tile_rows` rows.
RowScaledTask describe(const Layout& layout, const Window& window, DType value_dtype,
                       const void* values, int64_t tile_rows) {
  constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
  const Format& format = *layout.format;
  TORCH_CHECK(has_row_scaled_kernels(format), "qshard: no CUDA kernel for format ", format.name);
  TORCH_CHECK(window.rows <= kMaxInt - tile_rows && layout.matrix_rows <= kMaxInt - tile_rows &&
                  layout.matrices() <= kMaxInt && layout.row_bytes() <= kMaxInt - 512,
              "qshard: a quantized tensor of ", layout.logical_rows, " x ", layout.cols,
              " is too large for the CUDA kernels");
  const int64_t size = value_size(value_dtype);
  const int64_t begin = window.offset + window.first_row;  // logical
  const int64_t live = std::clamp<int64_t>(layout.logical_rows - begin, 0, window.rows);
  RowScaledTask task = {};
  task.values = const_cast<void*>(values);
  task.rows = static_cast<int>(window.rows);
  task.live_rows = static_cast<int>(live);
  task.cols = static_cast<int>(layout.cols);
  task.block_cols = static_cast<int>(layout.block_cols());
  task.row_bytes = static_cast<int>(layout.row_bytes());
  task.image_row_bytes = static_cast<int>(layout.image_row_bytes());
  task.row_scale_offset = static_cast<int>(layout.row_scale_offset());
  task.matrix_rows = static_cast<int>(layout.matrix_rows);
  task.tile_cols = static_cast<int>(ceil_div(layout.cols * size, kTileRowBytes));
  task.grid_numel = static_cast<int>(layout.grid_numel());
  task.last_boundary_begin = task.live_rows;
  task.vectorized = reinterpret_cast<uintptr_t>(values) % 16 == 0 && layout.cols * size % 16 == 0;
  if (live > 0) {
    const int64_t matrix = begin / layout.matrix_rows;
    const int64_t tiles_per_matrix = ceil_div(layout.matrix_rows, tile_rows);
    const auto tile_of = [&](int64_t row) {
      return row / layout.matrix_rows * tiles_per_matrix + row % layout.matrix_rows / tile_rows;
    };
    task.first_matrix = static_cast<int>(matrix);
    task.matrix_begin = static_cast<int>(matrix * layout.matrix_rows - begin);
    task.first_tile = static_cast<int>(begin % layout.matrix_rows / tile_rows);
    task.tiles_per_matrix = static_cast<int>(tiles_per_matrix);
    task.live_tile_rows = static_cast<int>(tile_of(begin + live - 1) - tile_of(begin) + 1);
  }
  return task;
}

// The live rows of a shard's first and last block rows.
struct EdgeRows {
  int64_t first_end;   // [0, first_end)
  int64_t last_begin;  // [last_begin, live)
};

EdgeRows edge_rows(const Layout& layout) {
  const int64_t live = layout.live_rows();
  const int64_t block = layout.format->scale.block_rows;
  const int64_t first = layout.row_offset % layout.matrix_rows;  // in its matrix
  const int64_t last = (layout.row_offset + live - 1) % layout.matrix_rows;
  const int64_t first_end = std::min((first / block + 1) * block, layout.matrix_rows) - first;
  return {std::min(first_end, live), std::max<int64_t>(live - 1 - last % block, 0)};
}

RowScaledTask describe(const DequantizeTask& task) {
  const Layout& layout = task.layout;
  const int64_t offset = layout.row_offset;
  RowScaledTask out = describe(layout, {offset, task.first_row, task.rows}, task.value_dtype,
                               task.values, kCodeTileRows);
  out.image = const_cast<uint8_t*>(task.image) + task.first_row * layout.row_bytes();
  out.grid = const_cast<float*>(task.grid);
  return out;
}

// What a task adds to amaxes from rows [begin, end) alone, all of them in the block row whose amax
// entries begin at `entry`.
RowScaledTask describe_boundary(const QuantizeTask& task, int64_t begin, int64_t end, int entry) {
  const Layout& layout = task.layout;
  const auto* values =
      static_cast<const uint8_t*>(task.values) + begin * layout.cols * value_size(task.value_dtype);
  RowScaledTask out = describe(layout, {layout.row_offset, begin, end - begin}, task.value_dtype,
                               values, kAmaxTileRows);
  out.amax = task.amax;
  out.first_boundary_end = out.live_rows;
  out.first_boundary = entry;
  return out;
}

}  // namespace

RowScaledTask describe_row_scaled(const QuantizeTask& task, int64_t tile_rows) {
  const Layout& layout = task.layout;
  const Layout cut = layout.coarsest_image();
  const Window window = {layout.row_offset, 0, layout.rows};
  RowScaledTask out = describe(layout, window, task.value_dtype, task.values, tile_rows);
  TORCH_CHECK(amax_numel(layout, task.boundary) <= std::numeric_limits<int>::max(),
              "qshard: too many scale blocks for the CUDA kernels");
  out.image = task.image;
  out.amax = task.amax;
  out.grid = task.grid;
  out.grid_copy = task.grid_copy;
  if (out.live_rows == 0) return out;
  const EdgeRows edges = edge_rows(cut);
  const auto entry = [&](int64_t index) {
    return static_cast<int>(layout.grid_numel() + index * cut.block_cols());
  };
  if (task.boundary.first >= 0) {
    out.first_boundary_end = static_cast<int>(edges.first_end);
    out.first_boundary = entry(task.boundary.first);
  }
  if (task.boundary.last >= 0) {
    out.last_boundary_begin = static_cast<int>(edges.last_begin);
    out.last_boundary = entry(task.boundary.last);
  }
  return out;
}

void compute_amax_row_scaled(std::span<const QuantizeTask> tasks, cudaStream_t stream) {
  const auto launch = [&](const RowScaledFlushBatch& batch, const Format& format, DType dtype) {
    return launch_amax(batch, format, dtype, stream);
  };
  launch_by_kind<RowScaledFlushBatch>(tasks, launch, [](auto& batcher, const QuantizeTask& task) {
    if (!task.known_amax.empty()) return;
    const RowScaledTask whole = describe_row_scaled(task, kAmaxTileRows);
    if (task.layout.format->outer_scale) {
      batcher.add(whole, amax_blocks(whole));
      return;
    }
    // Other rows are not read.
    const auto add_boundary = [&](int begin, int end, int entry) {
      if (begin >= end) return;
      const RowScaledTask cut = describe_boundary(task, begin, end, entry);
      batcher.add(cut, amax_blocks(cut));
    };
    add_boundary(0, whole.first_boundary_end, whole.first_boundary);
    add_boundary(std::max(whole.last_boundary_begin, whole.first_boundary_end), whole.live_rows,
                 whole.last_boundary);
  });
}

void quantize_row_scaled(std::span<const QuantizeTask> tasks, cudaStream_t stream) {
  const auto launch = [&](const auto& batch, const Format& format, DType dtype) {
    return launch_quantize(batch, format, dtype, stream);
  };
  launch_by_kind<RowScaledFlushBatch>(tasks, launch, [](auto& batcher, const QuantizeTask& task) {
    if (task.rounding != nullptr) return;
    const RowScaledTask described = describe_row_scaled(task, kCodeTileRows);
    batcher.add(described, quantize_blocks(described));
  });
  if (std::ranges::none_of(tasks, &QuantizeTask::rounding)) return;
  launch_by_kind<StochasticRowScaledBatch>(
      tasks, launch, [](auto& batcher, const QuantizeTask& task) {
        if (task.rounding == nullptr) return;
        const StochasticRowScaledTask described = describe_stochastic(task);
        batcher.add(described, quantize_blocks(described));
      });
}

void dequantize_row_scaled(std::span<const DequantizeTask> tasks, cudaStream_t stream) {
  const auto launch = [&](const RowScaledBatch& batch, const Format& format, DType dtype) {
    return launch_dequantize(batch, format, dtype, stream);
  };
  launch_by_kind<RowScaledBatch>(tasks, launch, [](auto& batcher, const DequantizeTask& task) {
    const RowScaledTask described = describe(task);
    batcher.add(described, dequantize_blocks(described));
  });
}

}  // namespace qshard::cuda
