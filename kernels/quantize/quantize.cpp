#include "kernels/quantize/quantize.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "kernels/quantize/cpu/quantize_cpu.h"
#include "kernels/quantize/quantize_cuda.h"

namespace qshard {
namespace {

bool has_grid_scales(const auto& task) { return task.layout.format->scale.is_in_grid(); }

// Calls each function with the tasks of its formats.
template <typename Task>
void split_by_kind(std::span<const Task> tasks, void (*by_grid)(std::span<const Task>),
                   void (*row_scaled)(std::span<const Task>)) {
  if (std::all_of(tasks.begin(), tasks.end(), has_grid_scales<Task>)) return by_grid(tasks);
  std::vector<Task> kinds[2];
  for (const Task& task : tasks) kinds[has_grid_scales(task)].push_back(task);
  if (!kinds[1].empty()) by_grid(kinds[1]);
  row_scaled(kinds[0]);
}

template <typename Task>
bool has_two_images(const Task& task) {
  return task.layout.format->columnwise != nullptr;
}

QuantizeTask rowwise_part(QuantizeTask task) {
  task.layout = task.layout.rowwise();
  task.boundary = {};
  return task;
}

QuantizeTask columnwise_part(QuantizeTask task) {
  task.image += task.layout.columnwise_offset();
  task.layout = task.layout.columnwise();
  return task;
}

DequantizeTask image_part(DequantizeTask task) {
  const Layout& layout = task.layout;
  TORCH_CHECK(task.columnwise ? layout.has_columnwise() : layout.has_rowwise(),
              fmt::format("qshard: this {} tensor was gathered without its {} image",
                          layout.format->name, task.columnwise ? "columnwise" : "rowwise"));
  if (!task.columnwise) {
    task.layout = layout.rowwise();
    return task;
  }
  task.image += layout.columnwise_offset();
  task.layout = layout.columnwise();
  const int64_t block = task.layout.format->scale.block_rows;
  const int64_t offset = layout.row_offset;
  const int64_t begin = offset + task.first_row;
  const int64_t end = std::min(begin + task.rows, layout.logical_rows);
  TORCH_CHECK(
      end <= begin ||
          (begin / block * block >= offset && round_up(end, block) <= offset + layout.rows),
      fmt::format("qshard: the columnwise image of rows [{}, {}) is in blocks of {} rows, and only "
                  "rows [{}, {}) are here; gather the tensor first",
                  begin, end, block, offset, offset + layout.rows));
  return task;
}

// Calls run(tasks) with what split(task, parts) makes of every task that `is_split` is true of.
template <typename Task, typename Split, typename Run>
void with_parts(std::span<const Task> tasks, bool (*is_split)(const Task&), const Split& split,
                const Run& run) {
  if (std::none_of(tasks.begin(), tasks.end(), is_split)) return run(tasks);
  std::vector<Task> parts;
  parts.reserve(2 * tasks.size());
  for (const Task& task : tasks) {
    if (is_split(task)) {
      split(task, parts);
    } else {
      parts.push_back(task);
    }
  }
  run(std::span<const Task>(parts));
}

// Kernels know rows that follow one another, at one distance in the full tensor.
bool is_of_runs(const QuantizeTask& task) {
  const Layout& layout = task.layout;
  const bool is_cut = layout.full_matrix_rows && layout.rows > layout.matrix_rows;
  return !is_one_range(layout) || (is_cut && task.rounding != nullptr);
}
bool is_of_runs(const DequantizeTask& task) { return !is_one_range(task.layout); }

void split_into_runs(const QuantizeTask& task, std::vector<QuantizeTask>& parts) {
  const Layout& layout = task.layout;
  const int64_t value_bytes = layout.cols * value_size(task.value_dtype);
  QuantizeTask part = task;
  int64_t first = 0;
  do {  // the grid has scales of other ranks' rows, where there are none here, too
    const int64_t left = layout.rows - first;
    const int64_t count =
        is_one_range(layout)
            ? std::min(left, layout.matrix_rows - logical_row(layout, first) % layout.matrix_rows)
            : run_from(layout, first, left);
    part.layout = run_alone(layout, first, count);
    if (task.values) part.values = static_cast<const uint8_t*>(task.values) + first * value_bytes;
    if (task.image) part.image = task.image + first * layout.row_bytes();
    parts.push_back(part);
    first += count;
  } while (first < layout.rows);
}

void split_into_runs(const DequantizeTask& task, std::vector<DequantizeTask>& parts) {
  const Layout& layout = task.layout;
  const int64_t value_bytes = layout.cols * value_size(task.value_dtype);
  const int64_t end = task.first_row + task.rows;
  for (int64_t row = task.first_row; row < end; row += parts.back().rows) {
    DequantizeTask part = task;
    part.layout = with_run(layout, row);
    part.first_row = row;
    part.rows = run_from(layout, row, end - row);
    part.values = static_cast<uint8_t*>(task.values) + (row - task.first_row) * value_bytes;
    parts.push_back(part);
  }
}

void split_images(const QuantizeTask& task, std::vector<QuantizeTask>& parts) {
  if (task.layout.has_rowwise()) parts.push_back(rowwise_part(task));
  if (task.layout.has_columnwise()) parts.push_back(columnwise_part(task));
}

// Returns the other tasks.
std::vector<QuantizeTask> copy_known_amax(std::span<const QuantizeTask> tasks) {
  std::vector<QuantizeTask> unknown;
  for (const QuantizeTask& task : tasks) {
    if (task.known_amax.empty()) {
      unknown.push_back(task);
      continue;
    }
    const int64_t numel = amax_numel(task.layout, task.boundary);
    const auto known = std::min(static_cast<int64_t>(task.known_amax.size()), numel);
    std::copy_n(task.known_amax.begin(), known, task.amax);
    std::fill_n(task.amax + known, numel - known, 0.f);
  }
  return unknown;
}

// Calls run(tasks) with single images in place of formats of two.
template <typename Task, typename Split, typename Run>
void with_single_images(std::span<const Task> tasks, const Split& split, const Run& run) {
  with_parts<Task>(tasks, has_two_images<Task>, split, run);
}

// Calls run(tasks) with tasks whose rows follow one another.
template <typename Task, typename Run>
void with_runs(std::span<const Task> tasks, const Run& run) {
  const auto split = [](const Task& task, std::vector<Task>& parts) {
    split_into_runs(task, parts);
  };
  with_parts<Task>(tasks, is_of_runs, split, run);
}

void compute_amax_of_runs(std::span<const QuantizeTask> tasks, Stream stream) {
  if (!stream.is_cuda) {
    return with_single_images(tasks, split_images, [](std::span<const QuantizeTask> parts) {
      const auto unknown = copy_known_amax(parts);
      split_by_kind<QuantizeTask>(unknown, cpu::compute_amax_of_grid, cpu::compute_amax_row_scaled);
    });
  }
  cuda::compute_amax(tasks, stream.handle);
}

void quantize_runs(std::span<const QuantizeTask> tasks, Stream stream) {
  if (!stream.is_cuda) {
    return with_single_images(tasks, split_images, [](std::span<const QuantizeTask> parts) {
      split_by_kind(parts, cpu::quantize_by_grid, cpu::quantize_row_scaled);
      for (const QuantizeTask& task : parts) {
        if (task.grid_copy) std::copy_n(task.grid, task.layout.grid_numel(), task.grid_copy);
      }
    });
  }
  cuda::quantize(tasks, stream.handle);
}

}  // namespace

void compute_amax(std::span<const QuantizeTask> tasks, Stream stream) {
  if (tasks.empty()) return;
  with_runs(tasks, [&](std::span<const QuantizeTask> runs) { compute_amax_of_runs(runs, stream); });
}

void quantize(std::span<const QuantizeTask> tasks, Stream stream) {
  if (tasks.empty()) return;
  with_runs(tasks, [&](std::span<const QuantizeTask> runs) { quantize_runs(runs, stream); });
}

void quantize_at_once(std::span<const QuantizeTask> tasks, Stream stream) {
  std::vector<QuantizeTask> rest;
  if (stream.is_cuda) {
    rest = cuda::quantize_tiles(tasks, stream.handle);
    tasks = rest;
  }
  compute_amax(tasks, stream);
  quantize(tasks, stream);
}

void dequantize(std::span<const DequantizeTask> all_tasks, Stream stream) {
  if (all_tasks.empty()) return;
  const auto split = [](const DequantizeTask& task, std::vector<DequantizeTask>& parts) {
    parts.push_back(image_part(task));
  };
  with_runs(all_tasks, [&](std::span<const DequantizeTask> runs) {
    with_single_images(runs, split, [&](std::span<const DequantizeTask> tasks) {
      if (!stream.is_cuda) {
        return split_by_kind(tasks, cpu::dequantize_by_grid, cpu::dequantize_row_scaled);
      }
      cuda::dequantize(tasks, stream.handle);
    });
  });
}

}  // namespace qshard
