#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "kernels/cpu/values.h"
#include "kernels/numerics/hadamard.h"
#include "kernels/transpose/transpose_cpu.h"

namespace qshard::cpu {
namespace {

// Rows of `bytes` bytes or so for a thread at least.
int64_t rows_per_thread(int64_t bytes) { return std::max<int64_t>(1, 65536 / bytes); }

void transform_row(const TransposeTask& task, int64_t col) {
  for (int64_t first = 0; first < task.padded_rows; first += kHadamardSize) {
    float x[kHadamardSize] = {};
    for (int64_t i = first; i < std::min(first + kHadamardSize, task.rows); ++i) {
      x[i - first] = load_value(task.values, task.value_dtype, i * task.cols + col);
    }
    random_hadamard(x);
    for (int64_t i = 0; i < kHadamardSize; ++i) {
      store_value(task.out, task.value_dtype, col * task.padded_rows + first + i, x[i]);
    }
  }
}

template <typename Raw>
void copy_row(const TransposeTask& task, int64_t col) {
  const auto* from = static_cast<const Raw*>(task.values) + col;
  auto* to = static_cast<Raw*>(task.out) + col * task.padded_rows;
  for (int64_t i = 0; i < task.rows; ++i) to[i] = from[i * task.cols];
  std::fill(to + task.rows, to + task.padded_rows, Raw{});
}

}  // namespace

void transpose_values(const TransposeTask& task) {
  const auto row = task.hadamard                       ? transform_row
                   : value_size(task.value_dtype) == 4 ? copy_row<uint32_t>
                                                       : copy_row<uint16_t>;
  const int64_t row_size = task.padded_rows * value_size(task.value_dtype);
  at::parallel_for(0, task.cols, rows_per_thread(row_size), [&](int64_t begin, int64_t end) {
    for (int64_t col = begin; col < end; ++col) row(task, col);
  });
}

void transpose_image(const TransposeImageTask& task) {
  const Layout& from = task.layout;
  const Layout to = transposed_layout(from);
  const int64_t bits = from.format->code_bits;
  const int64_t block = from.format->scale.block_cols;
  const int mask = (1 << bits) - 1;
  at::parallel_for(0, to.rows, rows_per_thread(to.row_bytes()), [&](int64_t begin, int64_t end) {
    std::memset(task.out + begin * to.row_bytes(), 0, (end - begin) * to.row_bytes());
    for (int64_t row = begin; row < std::min(end, to.logical_rows); ++row) {
      const uint8_t* codes = task.image + row * bits / 8;
      const uint8_t* scales = task.image + from.row_scale_offset() + row / block;
      uint8_t* out = task.out + row * to.row_bytes();
      for (int64_t i = 0; i < to.cols; ++i) {
        const int code = codes[i * from.row_bytes()] >> (row * bits % 8) & mask;
        out[i * bits / 8] = static_cast<uint8_t>(out[i * bits / 8] | code << (i * bits % 8));
      }
      for (int64_t j = 0; j < to.block_cols(); ++j) {
        out[to.row_scale_offset() + j] = scales[j * block * from.row_bytes()];
      }
    }
  });
}

}  // namespace qshard::cpu
