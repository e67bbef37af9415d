#include "kernels/statistics/statistics.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/statistics/statistics_cuda.h"

namespace qshard {
namespace {

float value_at(const CodedMatrix& matrix, int64_t row, int64_t col) {
  const int64_t index = row * matrix.cols + col;
  if (matrix.value_dtype == DType::kFloat32) {
    return static_cast<const float*>(matrix.values)[index];
  }
  const uint16_t bits = static_cast<const uint16_t*>(matrix.values)[index];
  return matrix.value_dtype == DType::kBFloat16 ? bfloat16_to_float(bits) : half_to_float(bits);
}

float code_at(const CodedMatrix& matrix, int64_t row, int64_t col) {
  const uint8_t* codes = matrix.codes + row * matrix.code_pitch;
  if (matrix.code_dtype != DType::kFloat4E2M1) return value_of_code(matrix.code_dtype, codes[col]);
  return value_of_code(matrix.code_dtype, (codes[col / 2] >> (4 * (col % 2))) & 0xf);
}

void add_sum(int64_t& bits, double sum) {
  bits = std::bit_cast<int64_t>(std::bit_cast<double>(bits) + sum);
}

Tally tally_of_row(const CodedMatrix& matrix, int64_t row, float limit) {
  Tally tally;
  for (int64_t col = 0; col < matrix.cols; ++col) {
    const float scale = matrix.scale(row, col);
    float value = value_at(matrix, row, col);
    if (matrix.column_factors != nullptr) value *= matrix.column_factors[col];
    tally.add_scale(scale);
    tally.add(value, code_at(matrix, row, col), scale, limit);
  }
  return tally;
}

/// Row by row, so that sums do not depend on the number of threads.
void add_on_cpu(const CodedMatrix& matrix, int64_t* tally) {
  const float limit = saturates_above(matrix.code_dtype);
  std::vector<Tally> rows(matrix.rows);
  const int64_t rows_per_thread = std::max<int64_t>(1, at::internal::GRAIN_SIZE / matrix.cols);
  at::parallel_for(0, matrix.rows, rows_per_thread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) rows[row] = tally_of_row(matrix, row, limit);
  });
  for (const Tally& row : rows) {
    add_sum(tally[kSquares], row.squares);
    add_sum(tally[kErrorSquares], row.error_squares);
    tally[kUnderflows] += row.underflows;
    tally[kSaturated] += row.saturated;
    tally[kNonfinite] += row.nonfinite;
    const auto raise = [&](Statistic of, uint32_t bits) {
      tally[of] = std::max<int64_t>(tally[of], bits);
    };
    raise(kAmax, row.amax);
    raise(kLargestScale, row.largest_scale);
    raise(kSmallestScale, row.smallest_scale);
  }
  tally[kCount] += matrix.rows * matrix.cols;
}

}  // namespace

void add_statistics(const CodedMatrix& matrix, int64_t* tally, Stream stream) {
  if (matrix.rows == 0 || matrix.cols == 0) return;
  TORCH_CHECK(matrix.codes != nullptr && matrix.code_pitch % 16 == 0 &&
                  matrix.block_cols % 8 == 0 && matrix.row_scale_cols % 8 == 0,
              "qshard: no statistics of codes with ", matrix.code_pitch, " bytes a row and scales ",
              "of ", matrix.block_cols, " and ", matrix.row_scale_cols, " columns");
  if (!stream.is_cuda) return add_on_cpu(matrix, tally);
  cuda::add_statistics(matrix, tally, stream.handle);
}

}  // namespace qshard
