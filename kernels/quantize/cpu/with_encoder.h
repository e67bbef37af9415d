// Nearest or stochastic rounding, as a task asks, behind one call.
#pragma once

#include <ATen/core/PhiloxRNGEngine.h>

#include "kernels/cpu/row_kernels.h"
#include "kernels/numerics/random_words.h"
#include "kernels/quantize/cpu/row_ranges.h"

namespace qshard::cpu {

/// The random words of a task's elements from the beginning of a logical row on.
inline at::philox_engine random_words(const QuantizeTask& task, int64_t logical_row) {
  const auto first = static_cast<uint64_t>(task.layout.element(logical_row));
  at::philox_engine words(philox_key(task.rounding), philox_count(task.rounding), first / 4);
  for (uint64_t i = 0; i < first % 4; ++i) words();
  return words;
}

/// Calls run(encode) once. encode(values, n, scale, codes) is of RowKernels or what rounds
/// stochastically in its place: then its calls must walk the range row by row, leaving nothing out.
/// `value_dtype`: of the values that it is given.
template <typename Run>
void with_encoder(const QuantizeTask& task, const RowRange& range, DType value_dtype,
                  const Run& run) {
  const bool fp4 = task.layout.format->code_dtype == DType::kFloat4E2M1;
  const auto type = static_cast<int>(value_dtype);
  if (task.rounding == nullptr) {
    const RowKernels& kernels = row_kernels();
    run(fp4 ? kernels.encode_fp4[type] : kernels.encode[type]);
    return;
  }
  const StochasticRowKernels& kernels = stochastic_row_kernels();
  const auto encode = fp4 ? kernels.encode_fp4[type] : kernels.encode[type];
  at::philox_engine random = random_words(task, range.logical_row);
  // Rows follow each other in the full tensor unless that has more columns.
  const bool is_dense = task.layout.element_pitch() == task.layout.cols;
  int64_t row = range.logical_row;
  int64_t column = 0;
  run([&](const void* values, int64_t n, float scale, uint8_t* codes) {
    if (!is_dense && column == task.layout.cols) {
      random = random_words(task, ++row);
      column = 0;
    }
    encode(values, n, scale, random, codes);
    column += n;
  });
}

}  // namespace qshard::cpu
