// Experts on codes: activations quantized group by group in one pass, and one GEMM for all experts,
// for which the host does not wait for the device. What is packed is FP8 on Hopper, in blocks or
// with a scale for each expert's rows.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/gemm/scaled_grouped_mm.h"
#include "kernels/grouped/expert_weights.h"
#include "kernels/grouped/row_groups.h"
#include "kernels/linear/operand_producer.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard {

/// Codes of an activation or gradient (T, K), as the GEMM takes them.
struct GroupCodes {
  // Codes (T, K to 16), scales (ceil(K / 128), T to 16): a scale for 1x128 codes.
  at::Tensor rows = {};
  at::Tensor row_scales = {};
  at::Tensor row_vector = {};  // (T,), in their place: one scale for each row, of rows that arrived
  // Codes of the transpose (K, T'), in which an expert begins at a multiple of 128. Scales (T' /
  // 128, K to 16) of 1x128 codes or, where they are square, (ceil(K / 128), T' / 128 or more).
  at::Tensor columns = {};
  at::Tensor column_scales = {};
  bool square_columns = false;
  at::Tensor group_scales = {};  // (experts,), in place of the others: one scale for each
  at::Tensor saved_rows = {};    // the bytes of the rows and their scales,
  at::Tensor saved = {};         // and of the columns: restored_codes takes both
  // MXFP8 and NVFP4 have these, in place of all above (kernels/grouped/block_scaled_codes.h).
  BlockScaledCodes block_rows = {};
  BlockScaledCodes block_columns = {};
  at::Tensor column_ends = {};  // int32 (experts,), multiples of 128
};

/// Quantizes each expert's rows by themselves, in the orientations asked for; codes that arrived
/// stay as they are. `format`: of the weight. `delayed`: delayed scaling of all experts' rows, if
/// it is the format's; it collects the largest amax.
GroupCodes quantize_packed_groups(const GivenOperand& x, const Format& format, OperandRole role,
                                  Orientations orientations, const RowGroups& groups,
                                  const DelayedAmax& delayed);

/// The bytes of GroupCodes::saved of x (total, k) and `count` experts: uint8 (bytes,).
int64_t saved_columns_bytes(const Format& format, int64_t total, int64_t k, int64_t count);
/// The codes that quantize_packed_groups made of x (total, k) with these groups, from their bytes,
/// each undefined if it is not there.
/// @throws c10::Error for other bytes, and for rows with a scale for each expert.
GroupCodes restored_codes(const at::Tensor& rows, const at::Tensor& columns, const Format& format,
                          OperandRole role, int64_t total, int64_t k, const RowGroups& groups);

/// x's rows times each expert's matrix: by its transpose, or with `contract` as it lies.
at::Tensor multiply_by_packed_codes(const GroupCodes& x, const ExpertWeights& weights,
                                    const RowGroups& groups, bool contract, at::ScalarType dtype);

/// (E, N, K) = gradient^T @ input of each expert's rows; `sum` as GroupedOperands has it.
at::Tensor multiply_packed_columns(const GroupCodes& gradient, const GroupCodes& input,
                                   int64_t total, const RowGroups& groups, at::ScalarType dtype,
                                   const at::Tensor& sum);

}  // namespace qshard
