#include "kernels/scaling/scaling_state.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "kernels/scaling/delayed_scaling.h"
#include "kernels/scaling/scaling_state_cuda.h"

namespace qshard {
namespace {

/// What one step collected goes to the end of a row, the oldest is dropped.
void roll(float* history, int64_t length) {
  std::rotate(history, history + 1, history + length);
  history[0] = 0.f;
}

float largest_of(const float* history, const AmaxHistory& options) {
  return options.most_recent ? history[0] : *std::max_element(history, history + options.length);
}

void apply_delayed_scaling(const StateTask& task, FlushKind kind) {
  const Format& format = *task.layout.format;
  const AmaxHistory& options = format.amax_history;
  const int64_t weights = task.layout.grid_numel();
  for (int64_t row = 0; row < weights; ++row) {
    float* history = task.amax_history + row * options.length;
    float* scaling = task.scaling_amax + row * kScalingAmaxes;
    float& amax = task.amax[row];
    if (kind == FlushKind::kOutsideStep) {
      amax = refresh_weight(amax, scaling, format.code_max, format.scale.power_of_two,
                            options.margin, task.value_dtype);
      continue;
    }
    history[0] = is_finite_amax(amax) ? amax : 0.f;
    amax = step_weight(amax, largest_of(history, options), scaling, options.margin);
    roll(history, options.length);
  }
  if (kind == FlushKind::kOutsideStep) return;
  for (int64_t i = 0; i < kActivationRows; ++i) {
    const int64_t row = input_row(task.layout) + i;
    float* history = task.amax_history + row * options.length;
    history[0] = task.words[i];
    step_activation(largest_of(history, options), task.scaling_amax + row * kScalingAmaxes,
                    options.margin);
    roll(history, options.length);
  }
}

}  // namespace

void collect_state(std::span<const StateTask> tasks, Stream stream) {
  if (tasks.empty()) return;
  if (stream.is_cuda) {
    return cuda::collect_state(tasks, stream.handle);
  }
  for (const StateTask& task : tasks) {
    float* words = task.words;
    if (task.amax_history) {
      for (int64_t i = 0; i < kActivationRows; ++i) {
        *words++ = task.amax_history[(input_row(task.layout) + i) *
                                     task.layout.format->amax_history.length];
      }
    }
    if (task.rounding) std::memcpy(words, task.rounding, kRoundingWords * sizeof(int32_t));
  }
}

void apply_state(std::span<const StateTask> tasks, FlushKind kind, const float* found_inf,
                 Stream stream) {
  if (tasks.empty()) return;
  if (stream.is_cuda) {
    return cuda::apply_state(tasks, kind, found_inf, stream.handle);
  }
  if (found_inf && *found_inf != 0.f) kind = FlushKind::kOutsideStep;
  for (const StateTask& task : tasks) {
    if (task.amax_history) apply_delayed_scaling(task, kind);
    if (!task.rounding) continue;
    std::memcpy(task.rounding, task.words + (task.amax_history ? kActivationRows : 0),
                kRoundingWords * sizeof(int32_t));
    if (kind == FlushKind::kStep) ++task.rounding[kRoundingWords - 1];
  }
}

void delay_amax(float* amax, const DelayedAmax& delayed, Stream stream) {
  if (stream.is_cuda) {
    return cuda::delay_amax(amax, delayed, stream.handle);
  }
  *amax = delayed_amax(*amax, delayed.history, delayed.scaling, delayed.margin);
}

}  // namespace qshard
