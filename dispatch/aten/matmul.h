// Quantized weights as GEMM operands.
#pragma once

#include <ATen/ATen.h>

#include <span>
#include <string_view>

#include "kernels/linear/linear.h"

namespace qshard {

/// The weight (N, K) as a linear multiplies it: codes and scales, never the master, so that an
/// unsharded weight that keeps one multiplies exactly as the gathered one does.
/// @throws c10::Error naming `op` if the weight is not quantized, not a window of whole rows, or
/// has an update pending that only a collective can flush.
LinearWeight linear_weight(const at::Tensor& weight, const char* op);

/// Whether linear_weight takes the tensor: a quantized matrix of whole rows.
bool is_row_window(const at::Tensor& tensor);

/// What a gathered weight serves reads codes, master or not, so that one process, DDP and FSDP2
/// agree: linear, mm, addmm, bmm, and of the operators that have no kernel here these arguments.
/// Every other operator reads the value.
std::span<const std::string_view> arguments_read_as_codes(std::string_view op);
/// The values that such an argument stands for: dequantized codes, in the nominal dtype.
at::Tensor dequantized_codes(const at::Tensor& tensor, const char* op);

}  // namespace qshard
