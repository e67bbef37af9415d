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

bool has_two_images(const auto& task) { return task.layout.format->columnwise != nullptr; }

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

// Calls run(tasks) with what split(task, parts) makes of every task of a format of two row images.
template <typename Task, typename Split, typename Run>
void with_single_images(std::span<const Task> tasks, const Split& split, const Run& run) {
  if (std::none_of(tasks.begin(), tasks.end(), has_two_images<Task>)) return run(tasks);
  std::vector<Task> parts;
  parts.reserve(2 * tasks.size());
  for (const Task& task : tasks) {
    if (has_two_images(task)) {
      split(task, parts);
    } else {
      parts.push_back(task);
    }
  }
  run(std::span<const Task>(parts));
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

}  // namespace

void compute_amax(std::span<const QuantizeTask> tasks, Stream stream) {
  if (tasks.empty()) return;
  if (!stream.is_cuda) {
    return with_single_images(tasks, split_images, [](std::span<const QuantizeTask> parts) {
      const auto unknown = copy_known_amax(parts);
      split_by_kind<QuantizeTask>(unknown, cpu::compute_amax_of_grid, cpu::compute_amax_row_scaled);
    });
  }
  cuda::compute_amax(tasks, stream.handle);
}

void quantize(std::span<const QuantizeTask> tasks, Stream stream) {
  if (tasks.empty()) return;
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
  with_single_images(all_tasks, split, [&](std::span<const DequantizeTask> tasks) {
    if (!stream.is_cuda) {
      return split_by_kind(tasks, cpu::dequantize_by_grid, cpu::dequantize_row_scaled);
    }
    cuda::dequantize(tasks, stream.handle);
  });
}

}  // namespace qshard
