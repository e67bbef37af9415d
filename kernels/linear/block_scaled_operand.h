// Operands of GEMMs in formats with row-local scales (MXFP8, NVFP4): row images that contract along
// their rows. Their scales lie in the rows here; cuBLASLt's order: kernels/gemm/swizzle_scales.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "kernels/linear/quantized_matrix.h"

namespace qshard {

/// x (M, K) -> (K, round_up(M, 32)) in x's dtype: the transpose of x and zeros; with `hadamard`
/// each 16 rows of x go through the random Hadamard transform first (kernels/numerics/hadamard.h).
at::Tensor transposed_values(const at::Tensor& x, bool hadamard);

/// The image of `values`, contiguous, the live rows of `layout`. `change_amax`, if given, may
/// change the amaxes that the grid's scales are made of: float32 (layout.grid_numel(),).
RowImage quantized_as(const at::Tensor& values, const Layout& layout, const int32_t* rounding,
                      const std::function<void(const at::Tensor&)>& change_amax = {});

/// x (M, K), float32, bfloat16 or float16, as it meets a weight of `format`: (M, K), contracting
/// along K. `rounding`, on x's device, as in QuantizeTask.
RowImage quantized_rows(const at::Tensor& x, const Format& format, const int32_t* rounding);

/// The same of x^T (K, M), contracting along M. NVFP4's go through the random Hadamard transform:
/// both operands of wgrad do, so their product does not change.
RowImage quantized_columns(const at::Tensor& x, const Format& format, const int32_t* rounding);

/// The rows of a weight (N, K), contracting along K: a view. They are of one matrix, or of several
/// that share no scale.
RowImage weight_rows(const QuantizedMatrix& weight);

/// weight^T (K, N), contracting along N; its format has square blocks, and its first row begins
/// one.
RowImage weight_columns(const QuantizedMatrix& weight);

}  // namespace qshard
