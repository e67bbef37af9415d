// Experts on dequantized values: torch's grouped GEMM, one launch for all of them, for which the
// host does not wait for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/grouped/expert_weights.h"
#include "kernels/grouped/row_groups.h"

namespace qshard {

/// Whether torch multiplies matrices of `dtype` on this device so: bfloat16 on compute capability
/// 9.0 and 10.x. Elsewhere torch's grouped GEMM reads the groups' ends on the host
/// (aten/src/ATen/native/cuda/GroupedBlas.cpp).
bool has_grouped_gemm_of_values(at::Device device, at::ScalarType dtype);

/// rows (T, a) times each expert's matrix, whose values are read columnwise if the format has such
/// an image: by its transpose (`contract` false: weights lie as (E, b, a)) or as it lies (E, a, b).
/// Rows of none are zero.
at::Tensor multiply_by_values(const at::Tensor& rows, const ExpertWeights& weights,
                              const RowGroups& groups, bool contract);

/// (E, a, b) = left^T @ right of each expert's rows, left (T, a), right (T, b). `sum`, if it is
/// defined: it is added to, and what an expert without rows has there stays unchanged; else the
/// product is of `dtype`, and zero for such an expert. It is rounded to bfloat16 first.
at::Tensor multiply_transposed(const at::Tensor& left, const at::Tensor& right,
                               const RowGroups& groups, at::ScalarType dtype,
                               const at::Tensor& sum);

/// What multiply_transposed gives where `product`, (E, a, b), is the product of experts with rows.
/// `lengths`, (E,): 0 for those without, whose product may hold anything and is overwritten.
at::Tensor weight_gradient(const at::Tensor& product, const at::Tensor& lengths,
                           at::ScalarType dtype, const at::Tensor& sum);

}  // namespace qshard
