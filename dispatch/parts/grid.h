// Grid: the scales that span rows, and who may write them.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "kernels/tensors/read_only_tensor.h"

namespace qshard {

/// float32 (grid_rows, grid_cols), or nothing where a format has no such scales.
///
///   state      who reads the memory                    what may follow
///   owned      the buffer alone                        a write; give_grid(), which copies
///   snapshot   gathered tensors, and shards that were  Planes::own_grid(): owned, with the same
///              cut from one whole, too                 numbers in memory of the buffer's
///
/// Kernels write owned grids only, so that a flush of one buffer never changes the scales by which
/// another is read.
class Grid {
 public:
  Grid() = default;
  static Grid owned(at::Tensor scales) { return {scales, scales, {}}; }
  static Grid snapshot(ReadOnlyTensor scales) { return {scales, {}, scales}; }

  bool defined() const { return scales_.defined(); }
  bool is_snapshot() const { return scales_.defined() && !own_.defined(); }
  /// The scales; undefined where there are none.
  const ReadOnlyTensor& read() const { return scales_; }
  const float* data() const { return defined() ? scales_.const_data_ptr<float>() : nullptr; }

  /// The scales, to be written: what other buffers are given from now on is another copy.
  /// Planes::own_grid() comes first.
  at::Tensor write() {
    given_ = {};
    return shared();
  }
  float* mutable_data() { return defined() ? write().mutable_data_ptr<float>() : nullptr; }
  /// The scales for a tensor whose version counter tells of writes.
  at::Tensor shared() const {
    TORCH_INTERNAL_ASSERT(!is_snapshot(), "qshard: scales that other tensors read are written");
    return own_;
  }

  /// A copy that other buffers may hold, because it is replaced and never written; made before.
  const ReadOnlyTensor& given() const { return given_; }
  void set_given(ReadOnlyTensor copy) { given_ = std::move(copy); }

 private:
  Grid(ReadOnlyTensor scales, at::Tensor own, ReadOnlyTensor given)
      : scales_(std::move(scales)), own_(std::move(own)), given_(std::move(given)) {}

  ReadOnlyTensor scales_;
  at::Tensor own_;  // the same; undefined of a snapshot
  ReadOnlyTensor given_;
};

}  // namespace qshard
