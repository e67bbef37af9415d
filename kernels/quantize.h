// Quantize and dequantize row images on plain memory, CPU or CUDA, many tensors per call. All throw
// c10::Error for device memory where the library has no code for the device (kernels/cuda/
// check_launch.h) or was built without CUDA; sizes are the callers' to check.
#pragma once

#include <span>

#include "kernels/cuts.h"
#include "kernels/layout.h"
#include "kernels/stream.h"

namespace qshard {

/// One shard of one parameter. All pointers are device memory of the call's stream.
///
/// `amax` is what ranks agree on between compute_amax and quantize: the amax of every grid entry,
/// (grid_rows, grid_cols), then those of the blocks that several ranks hold rows of although their
/// scales are row-local, (cuts.rows, block_cols). Scales of other blocks need no amax from outside.
/// If there are two row images, only the columnwise one has cut blocks; both are written.
struct QuantizeTask {
  Layout layout;
  Cuts cuts;
  DType value_dtype = DType::kFloat32;  // float32, bfloat16 or float16
  const void* values = nullptr;         // (rows, cols), contiguous
  uint8_t* image = nullptr;             // (rows, row_bytes), 16-byte aligned
  float* amax = nullptr;                // (amax_numel(layout, cuts),)
  float* grid = nullptr;                // (grid_rows, grid_cols) scale_inv; null if !has_grid()
  float* grid_copy = nullptr;           // null, or a second place for the grid
  /// Null: codes are rounded to nearest even. Else (key_low, key_high, count), none negative:
  /// codes, not scales, are rounded stochastically, by the words that kernels/random_words.h names.
  const int32_t* rounding = nullptr;
  /// Not empty: what compute_amax would find, but for zeros after it. It looks at no values then.
  std::span<const float> known_amax = {};
  /// Null, or (grid_rows, grid_cols): scale_inv that fused_adamw() made the image's codes by, 0
  /// where it made none. On CUDA devices quantize() leaves those codes whose scale that still is.
  float* provisional = nullptr;
};

/// Sets every entry of `amax`: the largest |x| of the task's live rows in each grid entry or cut
/// block (as float bits, so that NaN compares above infinity), 0 where this shard has no rows.
/// What is known of a task's amaxes is copied.
void compute_amax(std::span<const QuantizeTask> tasks, Stream stream);

/// Writes the whole `grid` from the agreed `amax`, and codes and row-local
/// scales of the live rows from `values`. Padding rows and padding bytes become zero.
void quantize(std::span<const QuantizeTask> tasks, Stream stream);

/// compute_amax(), then quantize(), for amaxes that no other rank has a part in: in one pass over
/// the values where that can be.
void quantize_at_once(std::span<const QuantizeTask> tasks, Stream stream);

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

/// values = code * scale_inv, rounded once to value_dtype, where a block's row-local scale times
/// the matrix's is rounded to fp32 first; NaN scales give NaN. Rows that are not live read as zero.
/// @throws c10::Error if the layout lacks the image asked for, or rows of its blocks.
void dequantize(std::span<const DequantizeTask> tasks, Stream stream);

}  // namespace qshard
