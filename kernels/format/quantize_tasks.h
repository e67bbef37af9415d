// What kernels/quantize/quantize.h and the kernels behind it are given: one shard, its codes and
// its scales.
#pragma once

#include <span>

#include "kernels/format/boundary_blocks.h"
#include "kernels/format/layout.h"

namespace qshard {

/// One shard of one parameter. All pointers are device memory of the call's stream.
///
/// `amax` is what ranks agree on between compute_amax and quantize: the amax of every grid entry,
/// (grid_rows, grid_cols), then those of the blocks that several ranks hold rows of although their
/// scales are row-local, (boundary.rows, block_cols). Scales of other blocks need no amax from
/// outside. If there are two row images, only the columnwise one has boundary blocks; both are
/// written.
struct QuantizeTask {
  Layout layout;
  BoundaryBlocks boundary;
  DType value_dtype = DType::kFloat32;  // float32, bfloat16 or float16
  const void* values = nullptr;         // (rows, cols), contiguous
  uint8_t* image = nullptr;             // (rows, row_bytes), 16-byte aligned
  float* amax = nullptr;                // (amax_numel(layout, boundary),)
  float* grid = nullptr;                // (grid_rows, grid_cols) scale_inv; null if !has_grid()
  float* grid_copy = nullptr;           // null, or a second place for the grid
  /// Null: codes are rounded to nearest even. Else (key_low, key_high, count), none negative:
  /// codes, not scales, are rounded stochastically, by the words that
  /// kernels/numerics/random_words.h names.
  const int32_t* rounding = nullptr;
  /// Not empty: what compute_amax would find, but for zeros after it. It looks at no values then.
  std::span<const float> known_amax = {};
  /// Null, or (grid_rows, grid_cols): scale_inv that fused_adamw() made the image's codes by, 0
  /// where it made none. On CUDA devices quantize() keeps the codes whose scale is still the same.
  float* speculative_scale_inv = nullptr;
};

struct DequantizeTask {
  Layout layout;
  const uint8_t* image = nullptr;
  const float* grid = nullptr;
  int64_t first_row = 0;  // rows [first_row, first_row + rows) of the image
  int64_t rows = 0;
  DType value_dtype = DType::kFloat32;
  void* values = nullptr;  // (rows, cols), contiguous
  /// Read the columnwise image. The whole blocks of rows that are asked for must be there.
  bool columnwise = false;
};

}  // namespace qshard
