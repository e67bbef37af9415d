// Delayed scaling of a linear's input and of the gradient of its output.
#pragma once

#include "kernels/linear_weight.h"

namespace qshard {

/// The rows of one activation in the tables of kernels/scaling_state.h; null without delayed
/// scaling.
struct DelayedAmax {
  float* history = nullptr;
  const float* scaling = nullptr;
  int margin = 0;

  explicit operator bool() const { return history != nullptr; }
};

/// @throws c10::Error if the history lies on another device than the weight.
DelayedAmax delayed_input_amax(const LinearWeight& weight);
DelayedAmax delayed_gradient_amax(const LinearWeight& weight);

/// The amax that per-tensor scaling of x (M, K) goes by, float32 (1,) on its device: its own, or
/// with delayed scaling that of earlier steps, while its own is collected.
at::Tensor activation_amax(const at::Tensor& x, const DelayedAmax& delayed);

/// Collects the amax of an activation that nothing quantizes, so that training can go on where
/// something does. Does nothing without delayed scaling.
void collect_amax(const at::Tensor& x, const DelayedAmax& delayed);

}  // namespace qshard
