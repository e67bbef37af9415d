// torch's GEMM of many groups of block-scaled codes, at::_scaled_grouped_mm_v2, which Blackwell
// has, and the order of scales that it reads. What it asks for, groups of any size apart, stands in
// https://github.com/meta-pytorch/MSLK/blob/main/include/mslk/gemm/cutlass/grouped_common.cuh.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/format/formats.h"

namespace qshard {

/// An operand that contracts along its rows. Codes are uint8, contiguous: (rows, contracted), or
/// (groups, rows, contracted) where each group has a matrix of its own; what is contracted has a
/// multiple of 32 codes.
struct BlockScaledCodes {
  at::Tensor codes = {};
  at::Tensor scales = {};         // uint8, as swizzled() or swizzled_by_group() give them
  at::Tensor tensor_scales = {};  // float32 (groups,) of NVFP4, else undefined
  int64_t rows = 0;               // a matrix has so many, and zeros that pad it
};

// Rows of groups begin in the scales at a multiple of these, whatever row their codes begin at; a
// group's contracted codes begin at one, too.
constexpr int64_t kGroupAlignment = 128;

/// Scales (rows, n) or (groups, rows, n), uint8 of any strides: rows padded to a multiple of 128
/// and n to one of 4 by zeros, in tiles as kernels/gemm/swizzle_scales.h has them. (rows, n) with
/// two dimensions, (groups, rows * n) with three, padding included.
at::Tensor swizzled(const at::Tensor& scales);
/// The same of (rows, n) whose columns belong to groups: each group's tiles follow those of the one
/// before, as a matrix of its own. `ends`: int32 (groups,), each group's end in columns, multiples
/// of 4.
at::Tensor swizzled_by_group(const at::Tensor& scales, const at::Tensor& ends);

/// Whether torch has a kernel of the operator for such devices.
bool has_scaled_grouped_mm(at::Device device);
/// Whether that multiplies codes of this mode, kBlock1x32 or kBlock1x16: runs a small product, for
/// which the host does not wait.
bool tries_scaled_grouped_mm(ScaleMode mode, at::Device device);

/// bfloat16 products. b with three dimensions: (rows of a, rows of b), rows of a of each group by
/// the transpose of its matrix; rows that belong to none are not written. With two: (groups, rows
/// of a, rows of b), what is contracted belongs to groups; products of groups without any are not
/// written. b's rows are a multiple of 16. `ends`: int32 (groups,), on the device, where groups
/// end.
at::Tensor scaled_grouped_mm(ScaleMode mode, const BlockScaledCodes& a, const BlockScaledCodes& b,
                             const at::Tensor& ends);

}  // namespace qshard
