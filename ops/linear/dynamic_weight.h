// Weights that stay plain: quantized for one use.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "kernels/linear/linear.h"

namespace qshard {

/// What a use reads of the weight: wgrad reads nothing but what collects amaxes, and no codes are
/// made for it.
enum class WeightUse { kForward, kDgrad, kWgradOnly };

/// A plain weight (N, K) quantized for one use. `state`, float32 on the weight's device: empty; of
/// formats with all scales in a grid perhaps the weight's amaxes, (grid_rows * grid_cols,), which
/// are then not looked for; or delayed scaling's amax_history and scaling_amax: codes are scaled by
/// what is in use there, and the linear collects amaxes in them (kernels/scaling/scaling_state.h).
/// @throws c10::TypeError for other dtypes than float32, bfloat16 and float16; c10::ValueError for
/// other than two dimensions, rows that the format cannot have, stochastic rounding and state
/// tensors that are not the format's. All name `op`.
LinearWeight quantize_for_use(const at::Tensor& weight, const Format& format, at::TensorList state,
                              WeightUse use, const char* op);
/// The same as a quantized tensor of all images, for several uses of one weight. It shares `state`.
/// @throws as quantize_for_use.
at::Tensor quantize_for_uses(const at::Tensor& weight, c10::string_view format,
                             const std::vector<at::Tensor>& state);

}  // namespace qshard
