#include "kernels/quantize/quantize_cuda.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "kernels/device/batcher.h"
#include "kernels/quantize/columnwise/columnwise.h"
#include "kernels/quantize/grid_scaled/tasks.h"
#include "kernels/quantize/row_scaled/quantize.h"

namespace qshard::cuda {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int>::max();

bool rows_are_vectors(const void* values, int64_t cols, DType dtype) {
  return reinterpret_cast<uintptr_t>(values) % 16 == 0 && cols * value_size(dtype) % 16 == 0;
}

// Describes rows whose row 0 is logical row `row_offset`; live_rows of them belong to the tensor.
GridScaledTask describe(const Layout& layout, int64_t row_offset, int64_t rows, int64_t live_rows,
                        DType value_dtype, const void* values) {
  const Format& format = *layout.format;
  TORCH_CHECK(format.code_dtype == DType::kFloat8E4M3 && format.scale.is_in_grid() &&
                  (format.scale.spans_matrix() || format.scale.is_of_row() ||
                   (format.scale.block_rows == kTileRows && format.scale.block_cols == kTileCols)),
              "qshard: no CUDA kernel for format ", format.name);
  TORCH_CHECK(rows <= kMaxInt && layout.row_bytes() <= kMaxInt && layout.grid_numel() <= kMaxInt,
              "qshard: a quantized tensor of ", rows, " x ", layout.cols,
              " is too large for the CUDA kernels");
  GridScaledTask task = {};
  task.values = const_cast<void*>(values);
  task.row_offset = row_offset;
  task.matrix_rows = layout.matrix_rows;
  task.rows = static_cast<int>(rows);
  task.live_rows = static_cast<int>(live_rows);
  task.cols = static_cast<int>(layout.cols);
  task.row_bytes = static_cast<int>(layout.row_bytes());
  task.tile_cols = static_cast<int>(ceil_div(layout.cols, kTileCols));
  task.grid_numel = static_cast<int>(layout.grid_numel());
  task.grid_cols = static_cast<int>(layout.grid_cols());
  task.code_max = format.code_max;
  task.blockwise = format.scale.block_rows == kTileRows;
  task.power_of_two = format.scale.power_of_two;
  task.vectorized = rows_are_vectors(values, layout.cols, value_dtype);
  if (live_rows > 0) {
    const int64_t tiles_per_matrix = ceil_div(layout.matrix_rows, kTileRows);
    const auto tile_row = [&](int64_t row) {
      return row / layout.matrix_rows * tiles_per_matrix + row % layout.matrix_rows / kTileRows;
    };
    task.tiles_per_matrix = static_cast<int>(tiles_per_matrix);
    task.first_tile_row = tile_row(row_offset);
    task.live_tile_rows =
        static_cast<int>(tile_row(row_offset + live_rows - 1) - task.first_tile_row + 1);
  }
  return task;
}

// A window of an image is a shard of its own, whose row 0 is the window's.
GridScaledTask describe(const DequantizeTask& task) {
  const Layout& layout = task.layout;
  const int64_t offset = layout.row_offset + task.first_row;
  const int64_t live = std::clamp<int64_t>(layout.logical_rows - offset, 0, task.rows);
  GridScaledTask out = describe(layout, offset, task.rows, live, task.value_dtype, task.values);
  out.image = const_cast<uint8_t*>(task.image) + task.first_row * layout.row_bytes();
  out.grid = const_cast<float*>(task.grid);
  return out;
}

// Formats with row-local scales are left to others.
bool is_ours(const Layout& layout) { return layout.format->scale.is_in_grid(); }

// Launches what has a scale per tile or matrix, and what has one per row: launch(batch, type,
// in_rows).
template <typename Batch, typename Task, typename Launch, typename Add>
void launch_grid_scaled(std::span<const Task> tasks, const Launch& launch, const Add& add) {
  for (const bool in_rows : {false, true}) {
    launch_by_type<Batch>(
        tasks,
        [&](const Layout& layout) {
          return is_ours(layout) && layout.format->scale.is_of_row() == in_rows;
        },
        [&](const Batch& batch, DType dtype) { return launch(batch, dtype, in_rows); }, add);
  }
}

void reset_amax(std::span<const QuantizeTask> tasks, cudaStream_t stream) {
  auto batcher = make_batcher<AmaxBatch>(
      [&](const AmaxBatch& batch) { return launch_amax_reset(batch, stream); });
  for (const QuantizeTask& task : tasks) {
    const int64_t numel = amax_numel(task.layout, task.boundary);
    TORCH_CHECK(numel <= kMaxInt, "qshard: too many scale blocks for the CUDA kernels");
    const auto known = std::min(static_cast<int64_t>(task.known_amax.size()), numel);
    const AmaxTask described = {task.amax, task.known_amax.data(), static_cast<int>(numel),
                                static_cast<int>(known)};
    batcher.add(described, amax_reset_blocks(described));
  }
  batcher.flush();
}

}  // namespace

GridScaledTask describe_grid_scaled(const QuantizeTask& task) {
  const Layout& layout = task.layout;
  GridScaledTask out = describe(layout, layout.row_offset, layout.rows, layout.live_rows(),
                                task.value_dtype, task.values);
  out.image = task.image;
  out.amax = task.amax;
  out.grid = task.grid;
  out.grid_copy = task.grid_copy;
  out.speculative_scale_inv = task.speculative_scale_inv;
  return out;
}

void compute_amax(std::span<const QuantizeTask> tasks, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  reset_amax(tasks, cuda_stream);
  const auto launch = [&](const auto& batch, DType dtype, bool in_rows) {
    return in_rows ? launch_amax_in_rows(batch, dtype, cuda_stream)
                   : launch_amax(batch, dtype, cuda_stream);
  };
  const auto add = [](auto& batcher, const QuantizeTask& task) {
    if (!task.known_amax.empty()) return;
    const GridScaledTask described = describe_grid_scaled(task);
    batcher.add(described, amax_blocks(described));
  };
  if (tasks.size() <= GridScaledBatch::kCapacity) {
    launch_grid_scaled<GridScaledBatch>(tasks, launch, add);
  } else {
    launch_grid_scaled<GridScaledFlushBatch>(tasks, launch, add);
  }
  compute_amax_row_scaled(tasks, cuda_stream);
  compute_amax_columnwise(tasks, cuda_stream);
}

void quantize(std::span<const QuantizeTask> tasks, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto launch = [&](const auto& batch, DType dtype, bool in_rows) {
    return in_rows ? launch_quantize_in_rows(batch, dtype, cuda_stream)
                   : launch_quantize(batch, dtype, cuda_stream);
  };
  launch_grid_scaled<GridScaledFlushBatch>(
      tasks, launch, [](auto& batcher, const QuantizeTask& task) {
        if (task.rounding != nullptr) return;
        const GridScaledTask described = describe_grid_scaled(task);
        batcher.add(described, quantize_blocks(described));
      });
  if (std::ranges::any_of(tasks, &QuantizeTask::rounding)) {
    launch_grid_scaled<StochasticGridScaledBatch>(
        tasks, launch, [](auto& batcher, const QuantizeTask& task) {
          if (task.rounding == nullptr) return;
          const Layout& layout = task.layout;
          const StochasticGridScaledTask described = {describe_grid_scaled(task), task.rounding,
                                                      layout.element(layout.row_offset),
                                                      layout.element_pitch()};
          batcher.add(described, quantize_blocks(described));
        });
  }
  quantize_row_scaled(tasks, cuda_stream);
  quantize_columnwise(tasks, cuda_stream);
}

std::vector<QuantizeTask> quantize_tiles(std::span<const QuantizeTask> tasks, void* stream) {
  const auto is_taken = [](const QuantizeTask& task) {
    return task.layout.format->scale.block_rows == kTileRows && task.layout.holds_all_rows() &&
           task.rounding == nullptr && task.known_amax.empty();
  };
  launch_by_type<GridScaledFlushBatch>(
      tasks, is_ours,
      [&](const GridScaledFlushBatch& batch, DType dtype) {
        return launch_quantize_tiles(batch, dtype, static_cast<cudaStream_t>(stream));
      },
      [&](auto& batcher, const QuantizeTask& task) {
        if (!is_taken(task)) return;
        const GridScaledTask described = describe_grid_scaled(task);
        batcher.add(described, quantize_tiles_blocks(described));
      });
  std::vector<QuantizeTask> others;
  std::ranges::remove_copy_if(tasks, std::back_inserter(others), is_taken);
  return others;
}

void dequantize(std::span<const DequantizeTask> tasks, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto launch = [&](const GridScaledBatch& batch, DType dtype, bool in_rows) {
    return in_rows ? launch_dequantize_in_rows(batch, dtype, cuda_stream)
                   : launch_dequantize(batch, dtype, cuda_stream);
  };
  launch_grid_scaled<GridScaledBatch>(tasks, launch, [](auto& batcher, const DequantizeTask& task) {
    const GridScaledTask described = describe(task);
    batcher.add(described, dequantize_blocks(described));
  });
  dequantize_row_scaled(tasks, cuda_stream);
  dequantize_columnwise(tasks, cuda_stream);
}

}  // namespace qshard::cuda
