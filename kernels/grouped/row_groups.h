// Which rows of a matrix belong to which expert.
#pragma once

#include <ATen/core/Tensor.h>

namespace qshard {

/// Rows of x of each expert: those of expert e end before row offs[e], where those of the next one
/// begin; rows after the last one's belong to none. int32 (experts,), contiguous, beside x. Ends
/// that decrease or lie behind the last row count as the nearest that does not.
struct RowGroups {
  at::Tensor offs;

  int64_t count() const { return offs.size(0); }
  /// The ends as they count among `total` rows: int32 (experts,) that do not decrease. Nothing
  /// waits for the device, here and below.
  at::Tensor ends(int64_t total) const;
};

/// Zeros in the rows that belong to no expert, in place.
void zero_rows_of_none(const at::Tensor& matrix, const at::Tensor& ends);

/// How many rows end before those of each expert begin: int32 (experts,).
at::Tensor starts_of(const at::Tensor& ends);

/// `matrix` with rows of zeros between experts, so that the rows of each begin at a multiple of
/// `alignment`, as many as it takes wherever they end.
struct AlignedRows {
  at::Tensor lengths;    // int32 (experts,): the rows of each, without those of zeros
  at::Tensor ends;       // int32 (experts,), multiples of the alignment
  at::Tensor expert_of;  // int64 (rows,): the last one's for rows behind it
  at::Tensor row_of;     // int64 (rows,): the row of the matrix, any for a row of zeros
  at::Tensor is_there;   // bool (rows, 1): whether it is none of zeros

  AlignedRows(const at::Tensor& ends_of_experts, int64_t total, int64_t alignment = 8);
  at::Tensor of(const at::Tensor& matrix) const;
  /// int64 (total,): where the rows of the matrix are, those of none anywhere.
  at::Tensor places(const at::Tensor& ends_of_experts, int64_t total) const;
};

}  // namespace qshard
