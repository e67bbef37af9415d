#include "kernels/statistics/statistics.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "kernels/cpu/values.h"
#include "kernels/statistics/statistics_cuda.h"

namespace qshard {
namespace {

float code_at(const CodedMatrix& matrix, int64_t row, int64_t col) {
  const uint8_t* codes = matrix.codes + row * matrix.code_pitch;
  if (matrix.code_dtype == DType::kFloat4E2M1) {
    return decode_e2m1((codes[col / 2] >> (4 * (col % 2))) & 0xf);
  }
  return matrix.code_dtype == DType::kFloat8E5M2 ? decode_e5m2(codes[col])
                                                 : decode_e4m3(codes[col]);
}

/// The largest float that is not above limit * scale, with which no float compares otherwise.
float limit_below(float limit, float scale) {
  const double exact = static_cast<double>(limit) * scale;
  const auto nearest = static_cast<float>(exact);
  return nearest > exact ? std::nextafter(nearest, 0.f) : nearest;
}

void add_sum(int64_t& bits, double sum) {
  bits = std::bit_cast<int64_t>(std::bit_cast<double>(bits) + sum);
}

Tally tally_of_row(const CodedMatrix& matrix, int64_t row, float limit) {
  Tally tally;
  const float* scales = matrix.scales_of(row);
  for (int64_t col = 0; col < matrix.cols; ++col) {
    const float scale = matrix.scale(scales, row, static_cast<int>(col));
    float value = cpu::load_value(matrix.values, matrix.value_dtype, row * matrix.cols + col);
    if (matrix.column_factors != nullptr) value *= matrix.column_factors[col];
    tally.add_scale(scale);
    tally.add(value, code_at(matrix, row, col) * scale, limit_below(limit, scale));
  }
  tally.amax = canonical_amax(tally.amax);
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
  TORCH_CHECK(matrix.codes != nullptr && matrix.code_pitch % 16 == 0 && matrix.cols < INT32_MAX &&
                  matrix.col_shift >= 3 && matrix.row_scale_shift >= 3,
              "qshard: no statistics of ", matrix.cols, " columns of codes with ",
              matrix.code_pitch, " bytes a row");
  if (!stream.is_cuda) return add_on_cpu(matrix, tally);
  cuda::add_statistics(matrix, tally, stream.handle);
}

}  // namespace qshard
