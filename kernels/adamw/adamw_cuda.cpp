#include "kernels/adamw/adamw_cuda.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "kernels/adamw/kernels.h"
#include "kernels/device/batcher.h"
#include "kernels/quantize/grid_scaled/tasks.h"
#include "kernels/quantize/row_scaled/tasks.h"

namespace qshard::cuda {
namespace {

AdamWParameters parameters_of(const AdamWOptions& options) {
  return {static_cast<float>(options.lr),
          static_cast<float>(options.beta1),
          static_cast<float>(options.beta2),
          static_cast<float>(options.weight_decay),
          static_cast<float>(options.eps),
          options.maximize,
          options.device_lr,
          options.grad_scale,
          options.found_inf};
}

// Adds to a described task what it updates beside the values.
template <typename Described, typename Base>
Described with_memory(const Base& base, const AdamWTask& task) {
  Described out = {base, {task.grad, task.exp_avg, task.exp_avg_sq, task.step}};
  out.values = task.parameter;
  const auto is_aligned = [](const void* memory) {
    return reinterpret_cast<uintptr_t>(memory) % 16 == 0;
  };
  out.vectorized &=
      is_aligned(task.grad) && is_aligned(task.exp_avg) && is_aligned(task.exp_avg_sq);
  return out;
}

// Steps those that quantize so much.
void step(std::span<const AdamWTask> all_tasks, StepQuantizes quantizes,
          const AdamWParameters& parameters, cudaStream_t stream) {
  std::vector<AdamWTask> alike;
  std::ranges::copy_if(all_tasks, std::back_inserter(alike),
                       [&](const AdamWTask& task) { return task.quantizes == quantizes; });
  const std::span<const AdamWTask> tasks = alike;
  for (const bool in_rows : {false, true}) {
    launch_by_type<AdamWGridScaledBatch>(
        tasks,
        [&](const Layout& layout) {
          const ScaleLevel& scale = layout.format->scale;
          return scale.is_in_grid() && scale.is_of_row() == in_rows;
        },
        [&](const AdamWGridScaledBatch& batch, DType dtype) {
          return in_rows ? launch_adamw_in_rows(batch, quantizes, parameters, dtype, stream)
                         : launch_adamw(batch, quantizes, parameters, dtype, stream);
        },
        [&](auto& batcher, const AdamWTask& task) {
          const auto described = with_memory<AdamWGridScaledTask>(describe_grid_scaled(task), task);
          batcher.add(described, adamw_blocks(described, quantizes));
        });
  }
  launch_by_kind<AdamWRowScaledBatch>(
      tasks,
      [&](const AdamWRowScaledBatch& batch, const Format& format, DType dtype) {
        return launch_adamw(batch, quantizes, parameters, format, dtype, stream);
      },
      [&](auto& batcher, const AdamWTask& task) {
        const bool to_codes = quantizes == StepQuantizes::kCodes;
        const auto described = with_memory<AdamWRowScaledTask>(
            describe_row_scaled(task, to_codes ? kCodeTileRows : kAmaxTileRows), task);
        batcher.add(described, adamw_blocks(described, quantizes));
      });
}

}  // namespace

void fused_adamw(std::span<const AdamWTask> tasks, const AdamWOptions& options, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const AdamWParameters parameters = parameters_of(options);
  for (const StepQuantizes quantizes :
       {StepQuantizes::kAmax, StepQuantizes::kSpeculative, StepQuantizes::kCodes}) {
    step(tasks, quantizes, parameters, cuda_stream);
  }
}

}  // namespace qshard::cuda
