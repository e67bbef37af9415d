// Cross entropy on the CPU, the definition of the CUDA kernels' bits.
#pragma once

#include "kernels/format/formats.h"
#include "kernels/loss/cross_entropy_task.h"

namespace qshard::cpu {

/// Sets log_sums, losses and totals.
void cross_entropy_losses(const CrossEntropyTask& task, DType dtype);
/// The gradients of each row's loss, (m, v) in `dtype`.
void cross_entropy_gradient(const CrossEntropyTask& task, DType dtype, void* values);

}  // namespace qshard::cpu
