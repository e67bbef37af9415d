// What quantizing lost of a matrix, element by element: the same arithmetic on CPU and CUDA.
//
// Counts and maxima are exact. Sums are of exact fp64 squares; only the order in which they are
// added differs, so that they agree to about 1e-15.
#pragma once

#include <cstdint>

#include "kernels/numerics/row_scales.h"

namespace qshard {

/// Values (rows, cols) beside their codes, in any layout that forward or dgrad reads: row images
/// and packed codes. All pointers are memory of the call's device. Blocks have a power of two of
/// columns, 8 or more: `>> shift` is the block of a column, and 0 with kAllColumns.
struct CodedMatrix {
  static constexpr int kAllColumns = 31;

  int64_t rows = 0;
  int64_t cols = 0;                       // below 2^31
  const void* values = nullptr;           // contiguous
  DType value_dtype = DType::kFloat32;    // float32, bfloat16 or float16
  const float* column_factors = nullptr;  // (cols,), null: codes are of values times these
  const uint8_t* codes = nullptr;         // 16-byte aligned
  int64_t code_pitch = 0;                 // bytes from row to row, a multiple of 16
  DType code_dtype = DType::kFloat8E4M3;
  // Scales of one byte: that of row r and column c is at r * code_pitch + (c >> row_scale_shift).
  const uint8_t* row_scales = nullptr;  // null: none
  RowScale row_scale = RowScale::kE8M0;
  int row_scale_shift = kAllColumns;
  // fp32 scales: above those, or alone. Rows count from `first_row` of a stack of matrices.
  const float* scales = nullptr;  // null: none
  int64_t first_row = 0;
  int64_t matrix_rows = 1;
  uint32_t block_rows = 0;  // 0: all rows of a matrix share a scale
  int64_t block_rows_per_matrix = 1;
  int col_shift = kAllColumns;
  int64_t row_block_pitch = 0;  // scales from a block to that below
  int64_t col_block_pitch = 0;  // and to the next
  int64_t bytes = 0;            // of codes and scales, as they lie there

  /// The fp32 scales of a row's blocks; null if there are none.
  QSHARD_HOST_DEVICE const float* scales_of(int64_t row) const {
    if (scales == nullptr) return nullptr;
    int64_t in_matrix = first_row + row, block = 0;
    if (in_matrix >= matrix_rows) {
      const int64_t matrix = in_matrix / matrix_rows;
      in_matrix -= matrix * matrix_rows;
      block = matrix * block_rows_per_matrix;
    }
    if (block_rows != 0) {
      block += block_rows == 1 ? in_matrix : static_cast<uint32_t>(in_matrix) / block_rows;
    }
    return scales + block * row_block_pitch;
  }
  /// `of_row`: scales_of() the row.
  QSHARD_HOST_DEVICE float scale(const float* of_row, int64_t row, int col) const {
    const float outer = of_row == nullptr ? 1.f : of_row[(col >> col_shift) * col_block_pitch];
    if (row_scales == nullptr) return outer;
    const uint8_t byte = row_scales[row * code_pitch + (col >> row_scale_shift)];
    return block_scale_inv(row_scale, byte, outer);
  }
};

/// Above this, in units of the scale, a magnitude saturates: it is farther from the largest code
/// than rounding would take it, half of the step by which codes go up there.
QSHARD_HOST_DEVICE float saturates_above(DType dtype) {
  if (dtype == DType::kFloat4E2M1) return 7.f;
  return dtype == DType::kFloat8E5M2 ? 61440.f : 464.f;
}

/// Which number of a tally is which. The first kSums of them add up over micro-batches and ranks,
/// of the others the largest counts: bits of magnitudes order as they do, NaN on top. All begin
/// with 0, and none is negative.
enum Statistic : int {
  kSquares,        // fp64: of values
  kErrorSquares,   // fp64: of values less what their codes stand for
  kCount,          // of elements
  kUnderflows,     // not zero, and their code is
  kSaturated,      // saturates_above()
  kNonfinite,      // infinite or NaN, or their code is: these are in no sum and no count but kCount
  kAmax,           // fp32 bits
  kLargestScale,   // fp32 bits
  kSmallestScale,  // kAbsMask less fp32 bits
  kStatistics
};
constexpr int kSums = kAmax;

struct Tally {
  double squares = 0;
  double error_squares = 0;
  uint32_t underflows = 0;
  uint32_t saturated = 0;
  uint32_t nonfinite = 0;
  uint32_t amax = 0;
  uint32_t largest_scale = 0;
  uint32_t smallest_scale = 0;

  QSHARD_HOST_DEVICE static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

  QSHARD_HOST_DEVICE void add_scale(float scale) {
    const uint32_t bits = float_bits(scale) & kAbsMask;
    largest_scale = larger(largest_scale, bits);
    smallest_scale = larger(smallest_scale, kAbsMask - bits);
  }
  /// A value, and what its code stands for. A magnitude saturates that is larger than `limit`.
  QSHARD_HOST_DEVICE void add(float value, float restored, float limit) {
    const uint32_t magnitude = float_bits(value) & kAbsMask;
    amax = larger(amax, magnitude);  // with a NaN's payload: canonical_amax() follows
    if (larger(magnitude, float_bits(restored) & kAbsMask) >= kInfBits) {
      ++nonfinite;
      return;
    }
    const double exact = value;
    const double error = exact - static_cast<double>(restored);
    squares += exact * exact;
    error_squares += error * error;
    underflows += magnitude != 0 && restored == 0.f;
    saturated += bits_float(magnitude) > limit;
  }
};

}  // namespace qshard
