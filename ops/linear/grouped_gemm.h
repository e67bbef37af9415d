// The GEMMs of experts, of codes that callers have: until linears of groups call them.
#pragma once

#include <ATen/core/Tensor.h>

namespace qshard {

/// kernels/grouped/grouped_gemm.h; `tokens` where groups cut what is contracted.
at::Tensor grouped_gemm_op(const at::Tensor& a, const at::Tensor& a_scale_inv, const at::Tensor& b,
                           const at::Tensor& b_scale_inv, const at::Tensor& offs,
                           std::optional<int64_t> tokens, bool contract_rows, bool square_scales,
                           int64_t tile_rows);

}  // namespace qshard
