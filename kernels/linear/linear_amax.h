// Delayed scaling of a linear's input and of the gradient of its output.
#pragma once

#include "kernels/linear/linear_weight.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard {

/// @throws c10::Error if the history lies on another device than the weight.
DelayedAmax delayed_input_amax(const LinearWeight& weight);
DelayedAmax delayed_gradient_amax(const LinearWeight& weight);

/// The amax of x (M, K), float32 (1,) on its device.
at::Tensor activation_amax(const at::Tensor& x);

/// Collects the amax of an activation that nothing quantizes, so that training can go on where
/// something does. Does nothing without delayed scaling.
void collect_amax(const at::Tensor& x, const DelayedAmax& delayed);

}  // namespace qshard
