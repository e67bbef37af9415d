// GEMMs of many groups in one launch, of FP8 codes with scales in blocks or of whole groups.
#pragma once

#include <ATen/core/Tensor.h>

namespace qshard {

/// Operands of a grouped GEMM: E4M3 codes (as float8_e4m3fn or uint8), rows of a multiple of 16.
struct GroupedOperands {
  at::Tensor a;            // (T, K), or (M, T') where groups cut what is contracted
  at::Tensor a_scale_inv;  // float32 (ceil(K / 128), at least T), (T' / 128, at least M), rows of
                           // a multiple of 4
  at::Tensor b;            // (groups, N, K), or (N, T')
  at::Tensor b_scale_inv;  // float32 (groups, ceil(N / 128), ceil(K / 128)) in any strides, or as
                           // that without groups, or as a_scale_inv where it has no square blocks
  at::Tensor offs;         // int32 (groups,): where groups end; read on the device alone
  int64_t tokens = 0;      // T
  bool contract_rows = false;  // b is (groups, K, N): codes and scales of what is its transpose
  bool square_scales = true;   // b's are of 128x128 blocks
  int64_t tile_rows = 0;       // 64, 128 or 256; 0: by rows per group. All give the same bits.
  at::ScalarType dtype = at::kBFloat16;  // the product's: or float16, float32
  int64_t columns = 0;  // the product's, where groups cut rows and it has fewer than N; 0: N
  at::Tensor sum = {};  // (groups, M, N), contiguous, of that dtype: the product is added to it
  // float32, in place of both scale_inv: scales of each operand that are constant along what is
  // contracted, one for each group, (groups,), or one for each row: a's (T,), or (groups, M) where
  // groups cut what is contracted, and b's (groups, N). a may be of E5M2 codes.
  at::Tensor a_group_scales = {};
  at::Tensor b_group_scales = {};
  at::Tensor a_row_vector = {};
  at::Tensor b_row_vector = {};
};

/// Whether this device multiplies such operands: Hopper.
bool has_grouped_gemm(at::Device device);

/// (T, N): rows of group e are a's @ b[e]^T, rows after the last group zero. Or, with b of two
/// dimensions, (groups, M, N): columns of group e, which begin at a multiple of 128 and are zero up
/// to the next one's, of a @ b^T. It is `sum`, if there is one: the product is rounded to its dtype
/// and added, and what a group without columns has there stays unchanged.
/// @throws c10::Error that begins with `op`, for operands that do not fit.
at::Tensor grouped_gemm(const char* op, const GroupedOperands& operands);

}  // namespace qshard
