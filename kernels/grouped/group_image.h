// The memory of GroupCodes, in builds with CUDA.
#pragma once

#include "kernels/grouped/grouped_codes.h"
#include "kernels/linear/packed_activation.h"

namespace qshard {

/// The tiles of 128 rows that experts have, on the device: int32 (tiles, 4), cuda::RowTile.
at::Tensor row_tiles(const RowGroups& groups, int64_t total, cudaStream_t stream);

/// Codes of a matrix (total, k) whose rows are in groups. The codes are yet to be written, or were
/// restored from their bytes.
class GroupImage {
 public:
  GroupImage(const Format& format, OperandRole role, int64_t total, int64_t k,
             Orientations orientations, const RowGroups& groups, at::Device device);
  /// `rows`, `columns`: GroupCodes::saved_rows and saved, or undefined.
  /// @throws c10::Error unless they have the bytes of such codes.
  GroupImage(const Format& format, OperandRole role, int64_t total, int64_t k,
             const RowGroups& groups, const at::Tensor& rows, const at::Tensor& columns);

  int64_t tiles() const { return width_ / 128; }
  /// What writes the codes; its values are not set.
  cuda::ActivationTask task() const;
  /// Views of the memory, with no group scales.
  GroupCodes codes() const;
  /// Those of the columns, behind their codes.
  at::Tensor group_scales() const;

 private:
  int64_t total_, k_, width_;
  at::Tensor rows_, columns_;
  QuantizedMatrix matrix_;
};

}  // namespace qshard
