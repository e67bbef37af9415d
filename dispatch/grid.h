// Grid: the scales that span rows, and who may write them.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace qshard {

/// float32 (grid_rows, grid_cols), or nothing where a format has no such scales. A grid is either
/// the buffer's own, or a snapshot that other buffers read, too: gathered tensors, and shards that
/// were cut from one whole, read the grid of the flush that made their codes. Kernels write owned
/// grids only, so that a flush of one buffer never changes the scales by which another is read.
class Grid {
 public:
  Grid() = default;
  static Grid owned(at::Tensor scales) { return Grid(std::move(scales), /*is_owned=*/true); }
  static Grid snapshot(at::Tensor scales) { return Grid(std::move(scales), /*is_owned=*/false); }

  bool defined() const { return scales_.defined(); }
  bool is_snapshot() const { return scales_.defined() && !is_owned_; }
  /// The scales, to be read; undefined where there are none.
  const at::Tensor& read() const { return scales_; }
  const float* data() const { return defined() ? scales_.const_data_ptr<float>() : nullptr; }
  /// The same, to be written: QuantizedBuffer::write_codes() comes first.
  const at::Tensor& write() const {
    TORCH_INTERNAL_ASSERT(!is_snapshot(), "qshard: scales that other tensors read are written");
    return scales_;
  }
  float* mutable_data() const { return defined() ? write().mutable_data_ptr<float>() : nullptr; }

 private:
  Grid(at::Tensor scales, bool is_owned) : scales_(std::move(scales)), is_owned_(is_owned) {}

  at::Tensor scales_;
  bool is_owned_ = false;
};

}  // namespace qshard
