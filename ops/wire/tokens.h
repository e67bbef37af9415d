// Tokens between tensor-parallel ranks: gathered as codes and scales, and summed. One operator
// each, so that eager code spends little time on the host, and compilers look into nothing.
//
// What a gather gives is, bit for bit, what quantizing the gathered values gives: blocks lie within
// one token, and the amax of a scale that spans all tokens is agreed on by the ranks first.
//
// Codes of one byte travel as they meet the weight's GEMM: E4M3 or the gradient's own, under one
// scale of all tokens, one of each token, in blocks of 1x128, or as rows that hold the scales of
// their blocks. Codes of four bits do for activations; gradients travel as values, since they are
// rounded after a random transform of all tokens. So do gradients that a weight's row scales
// multiply before they are quantized.
#pragma once

#include "ops/calls/ops.h"

namespace qshard {

/// self (..., K), of the same sizes on all ranks of the c10d group of that name, put together along
/// `dim`, in its dtype. `format`: of the weight that it meets, or "" to gather values.
/// @throws c10::Error before anything is sent, for arguments that do not go together.
Tensor gather_tokens(const Tensor& self, int64_t dim, c10::string_view format, bool is_gradient,
                     c10::string_view group);
Tensor gather_tokens_meta(const Tensor& self, int64_t dim, c10::string_view format,
                          bool is_gradient, c10::string_view group);

/// This rank's part, along `dim`, of the sum of self (...) over the ranks, where it has the same
/// sizes, a multiple of their number along `dim`.
/// @throws c10::Error as gather_tokens.
Tensor sum_and_scatter_tokens(const Tensor& self, int64_t dim, c10::string_view group);
Tensor sum_and_scatter_tokens_meta(const Tensor& self, int64_t dim, c10::string_view group);

}  // namespace qshard
