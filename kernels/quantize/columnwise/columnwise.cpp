#include "kernels/quantize/columnwise/columnwise.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "kernels/device/batcher.h"
#include "kernels/quantize/columnwise/kernels.h"
#include "kernels/quantize/row_scaled/tasks.h"

namespace qshard::cuda {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int>::max();

// Describes rows whose row 0 is logical row `row_offset`.
ColumnwiseTask describe(const Layout& layout, int64_t row_offset, int64_t rows, int64_t live_rows,
                        const void* values) {
  const Format& format = *layout.format;
  TORCH_CHECK(format.code_dtype == DType::kFloat8E4M3 && format.scale.dtype == DType::kFloat8E8M0 &&
                  format.scale.block_rows == kColumnRows && format.scale.block_cols == 1,
              "qshard: no CUDA kernel for format ", format.name);
  TORCH_CHECK(rows <= kMaxInt - 2 * kColumnRows && layout.row_bytes() <= kMaxInt - 512,
              "qshard: a quantized tensor of ", layout.logical_rows, " x ", layout.cols,
              " is too large for the CUDA kernels");
  ColumnwiseTask task = {};
  task.values = const_cast<void*>(values);
  task.rows = static_cast<int>(rows);
  task.live_rows = static_cast<int>(live_rows);
  task.cols = static_cast<int>(layout.cols);
  task.row_bytes = static_cast<int>(layout.row_bytes());
  task.row_scale_offset = static_cast<int>(layout.row_scale_offset());
  task.slice_bytes = static_cast<int>(layout.row_scale_bytes());
  // Matrices are in whole blocks, so blocks are those of all rows.
  task.first_in_block = static_cast<int>(row_offset % kColumnRows);
  task.block_rows =
      live_rows == 0 ? 0 : static_cast<int>(ceil_div(task.first_in_block + live_rows, kColumnRows));
  task.tile_cols = static_cast<int>(ceil_div(layout.cols, kColumnwiseThreads));
  task.first_boundary = task.last_boundary = -1;
  return task;
}

// What amaxes are found of. The image is not described.
ColumnwiseTask describe_values(const QuantizeTask& task) {
  const Layout layout = task.layout.columnwise();
  TORCH_CHECK(amax_numel(layout, task.boundary) <= kMaxInt,
              "qshard: too many scale blocks for the CUDA kernels");
  ColumnwiseTask out =
      describe(layout, layout.row_offset, layout.rows, layout.live_rows(), task.values);
  out.amax = task.amax;
  const auto entry = [&](int64_t cut) {
    return cut < 0 ? -1 : static_cast<int>(cut * layout.block_cols());
  };
  out.first_boundary = entry(task.boundary.first);
  out.last_boundary = entry(task.boundary.last);
  return out;
}

// A window of an image is a shard of its own, whose row 0 is the window's.
ColumnwiseTask describe(const DequantizeTask& task) {
  const Layout& layout = task.layout;
  const int64_t offset = layout.row_offset + task.first_row;
  const int64_t live = std::clamp<int64_t>(layout.logical_rows - offset, 0, task.rows);
  ColumnwiseTask out = describe(layout, offset, task.rows, live, task.values);
  out.image = const_cast<uint8_t*>(task.image) + task.first_row * layout.row_bytes();
  return out;
}

// Tasks of both images, or of the columnwise one.
bool is_quantized_here(const Layout& layout) { return layout.has_columnwise(); }

// Single columnwise images.
bool is_read_here(const Layout& layout) {
  return layout.format->scale.place == ScalePlace::kSlices;
}

}  // namespace

void compute_amax_columnwise(std::span<const QuantizeTask> tasks, cudaStream_t stream) {
  const auto launch = [&](const ColumnwiseFlushBatch& batch, DType dtype) {
    return launch_columnwise_amax(batch, dtype, stream);
  };
  launch_by_type<ColumnwiseFlushBatch>(tasks, is_quantized_here, launch,
                                       [](auto& batcher, const QuantizeTask& task) {
                                         if (!task.known_amax.empty()) return;
                                         const ColumnwiseTask described = describe_values(task);
                                         batcher.add(described, columnwise_amax_blocks(described));
                                       });
}

void quantize_columnwise(std::span<const QuantizeTask> tasks, cudaStream_t stream) {
  const auto launch = [&](const auto& batch, DType dtype) {
    return launch_quantize_both_images(batch, dtype, stream);
  };
  launch_by_type<RowScaledFlushBatch>(
      tasks, is_quantized_here, launch, [](auto& batcher, const QuantizeTask& task) {
        if (task.rounding != nullptr) return;
        const RowScaledTask described = describe_row_scaled(task, kCodeTileRows);
        batcher.add(described, quantize_blocks(described));
      });
  if (std::ranges::none_of(tasks, &QuantizeTask::rounding)) return;
  launch_by_type<StochasticRowScaledBatch>(
      tasks, is_quantized_here, launch, [](auto& batcher, const QuantizeTask& task) {
        if (task.rounding == nullptr) return;
        const StochasticRowScaledTask described = describe_stochastic(task);
        batcher.add(described, quantize_blocks(described));
      });
}

void dequantize_columnwise(std::span<const DequantizeTask> tasks, cudaStream_t stream) {
  const auto launch = [&](const ColumnwiseBatch& batch, DType dtype) {
    return launch_columnwise_dequantize(batch, dtype, stream);
  };
  launch_by_type<ColumnwiseBatch>(tasks, is_read_here, launch,
                                  [](auto& batcher, const DequantizeTask& task) {
                                    const ColumnwiseTask described = describe(task);
                                    batcher.add(described, columnwise_dequantize_blocks(described));
                                  });
}

}  // namespace qshard::cuda
