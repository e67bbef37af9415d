// Quantized weights as GEMM operands.
#pragma once

#include <ATen/ATen.h>

#include "kernels/linear.h"

namespace qshard {

/// The weight (N, K) as a GEMM operand: codes and scales, never the master, so that an unsharded
/// weight that keeps one multiplies exactly as the gathered one does.
/// @throws c10::Error naming `op` if the weight is not quantized, not a window of whole rows, or
/// has an update pending that only a collective can flush.
WeightOperand weight_operand(const at::Tensor& weight, const char* op);

}  // namespace qshard
