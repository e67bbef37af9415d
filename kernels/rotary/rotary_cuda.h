// Rotary position embedding in one pass. Runs on the current device and stream.
#pragma once

#include "kernels/rotary/rotary.h"

namespace qshard::cuda {

/// As qshard::rotate.
void rotate(const at::Tensor& values, const Rotation& rotation, const at::Tensor& out);

}  // namespace qshard::cuda
