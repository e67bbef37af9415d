#include "kernels/scaling/scaling_state_cuda.h"

#include <algorithm>

#include "kernels/device/batcher.h"
#include "kernels/device/check_launch.h"
#include "kernels/scaling/scaling_state_kernels.h"

namespace qshard::cuda {
namespace {

ScalingStateTask describe(const StateTask& task) {
  const Format& format = *task.layout.format;
  ScalingStateTask out = {};
  out.amax = task.amax;
  out.words = task.words;
  out.amax_history = task.amax_history;
  out.scaling_amax = task.scaling_amax;
  out.rounding = task.rounding;
  out.weight_rows = static_cast<int>(task.layout.grid_numel());
  out.rows = task.amax_history ? static_cast<int>(scaling_rows(task.layout)) : 0;
  out.history_length = static_cast<int>(format.amax_history.length);
  out.margin = format.amax_history.margin;
  out.code_max = format.code_max;
  out.value_dtype = task.value_dtype;
  out.most_recent = format.amax_history.most_recent;
  out.power_of_two = format.scale.power_of_two;
  return out;
}

template <typename Launch>
void launch_all(std::span<const StateTask> tasks, const Launch& launch, bool one_block_each) {
  auto batcher = make_batcher<ScalingStateBatch>(launch);
  for (const StateTask& task : tasks) {
    const ScalingStateTask described = describe(task);
    batcher.add(described, one_block_each ? 1 : std::max(described.rows, 1));
  }
  batcher.flush();
}

}  // namespace

void collect_state(std::span<const StateTask> tasks, void* stream) {
  const auto launch = [&](const ScalingStateBatch& batch) {
    return launch_collect_state(batch, static_cast<cudaStream_t>(stream));
  };
  launch_all(tasks, launch, /*one_block_each=*/true);
}

void apply_state(std::span<const StateTask> tasks, FlushKind kind, const float* found_inf,
                 void* stream) {
  const auto launch = [&](const ScalingStateBatch& batch) {
    return launch_apply_state(batch, kind, found_inf, static_cast<cudaStream_t>(stream));
  };
  launch_all(tasks, launch, /*one_block_each=*/false);
}

void delay_amax(float* amax, const DelayedAmax& delayed, void* stream) {
  check_launch(launch_delay_amax(amax, delayed.history, delayed.scaling, delayed.margin,
                                 static_cast<cudaStream_t>(stream)));
}

}  // namespace qshard::cuda
