// Experts on MXFP8 and NVFP4 codes: what quantizes activations group by group, and torch's GEMM of
// all experts (kernels/gemm/scaled_grouped_mm.h), for which the host does not wait for the device.
// It is made of torch's operators and the kernels of linears, and runs on the CPU, too, where a
// kernel of that GEMM is registered.
//
// Rows are quantized as those of a linear of each expert are, but gradients that round
// stochastically take the words of the places that they have among all experts' rows.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/grouped/grouped_codes.h"
#include "kernels/linear/linear.h"

namespace qshard {

/// Whether the GEMM multiplies activations of `dtype`, bfloat16, with weights of this format. A
/// small product is tried once for each device and kind of codes. While a CUDA graph is captured,
/// the answer is no where none was.
bool has_block_scaled_grouped_gemm(const Format& format, at::Device device, at::ScalarType dtype);
/// Whether there are more experts than it takes, or larger matrices.
bool is_too_large_for_block_scaled(const ExpertWeights& weights, int64_t total);

/// As quantize_groups: GroupCodes::block_rows, and block_columns with their ends.
GroupCodes quantize_block_scaled_groups(const GivenOperand& x, const Format& format,
                                        Orientations orientations, const RowGroups& groups,
                                        const GradientRounding& rounding);
/// Each expert's matrix as it lies, or its transpose, for which blocks are square.
BlockScaledCodes block_scaled_weights(const ExpertWeights& weights, bool transposes);
/// As multiply_by_codes, in bfloat16.
at::Tensor multiply_by_block_scaled_codes(const GroupCodes& x, const ExpertWeights& weights,
                                          const RowGroups& groups, bool contract);
/// As multiply_columns; the product is rounded to bfloat16 before it has `dtype` or is added.
at::Tensor multiply_block_scaled_columns(const GroupCodes& gradient, const GroupCodes& input,
                                         const RowGroups& groups, at::ScalarType dtype,
                                         const at::Tensor& sum);

}  // namespace qshard
