#include "kernels/quantize.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/quantize_cpu.h"
#ifdef QSHARD_WITH_CUDA
#include "kernels/cuda/quantize_cuda.h"
#endif

namespace qshard {
namespace {

#ifndef QSHARD_WITH_CUDA
[[noreturn]] void no_cuda(const char* operation) {
  TORCH_CHECK(false, "qshard: cannot ", operation,
              " on a CUDA tensor: this library was built without CUDA (nvcc was not found)");
}
#endif

bool has_grid_scales(const auto& task) { return task.layout.format->scales_in_grid(); }

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

}  // namespace

void compute_amax(std::span<const QuantizeTask> tasks, Stream stream) {
  if (tasks.empty()) return;
  if (!stream.is_cuda) {
    return split_by_kind(tasks, cpu::compute_amax_of_grid, cpu::compute_amax_row_scaled);
  }
#ifdef QSHARD_WITH_CUDA
  cuda::compute_amax(tasks, stream.handle);
#else
  no_cuda("compute an amax");
#endif
}

void quantize(std::span<const QuantizeTask> tasks, Stream stream) {
  if (tasks.empty()) return;
  if (!stream.is_cuda) {
    return split_by_kind(tasks, cpu::quantize_by_grid, cpu::quantize_row_scaled);
  }
#ifdef QSHARD_WITH_CUDA
  cuda::quantize(tasks, stream.handle);
#else
  no_cuda("quantize");
#endif
}

void dequantize(std::span<const DequantizeTask> tasks, Stream stream) {
  if (tasks.empty()) return;
  if (!stream.is_cuda) {
    return split_by_kind(tasks, cpu::dequantize_by_grid, cpu::dequantize_row_scaled);
  }
#ifdef QSHARD_WITH_CUDA
  cuda::dequantize(tasks, stream.handle);
#else
  no_cuda("dequantize");
#endif
}

}  // namespace qshard
