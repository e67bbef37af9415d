// Rotary position embedding (arXiv:2104.09864): pairs of channels turned by the angles of
// positions.
#pragma once

#include <ATen/core/Tensor.h>

namespace qshard {

/// A tensor (..., positions, ..., channels) of at most five dimensions, and how its pairs turn.
struct Rotation {
  /// float32 (positions or more, rotated channels), contiguous, beside the tensor; or one such
  /// table for each sequence, (sequences, positions or more, rotated channels).
  at::Tensor cos;
  at::Tensor sin;
  int64_t dim = 1;           // of the positions
  bool interleaved = false;  // neighbours are a pair, not channels half of the rotated ones apart
  bool inverse = false;      // by the transposed matrices

  int64_t rotated() const { return cos.size(-1); }
  bool has_tables_of_sequences() const { return cos.dim() == 3; }
  int64_t sequence_dim() const { return dim == 0 ? 1 : 0; }
};

/// out = values, each pair (a, b) of the first channels turned: a * cos_a - b * sin_a and b * cos_b
/// + a * sin_b, in float32, every operation rounded, and then once to the dtype. The same bits on
/// every device. `out`: of the sizes and dtype of `values`, with any strides but 1 of the channels.
void rotate(const at::Tensor& values, const Rotation& rotation, const at::Tensor& out);

}  // namespace qshard
