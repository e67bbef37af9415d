#include "kernels/activation/quantize_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels/cpu/row_kernels.h"
#include "kernels/format/layout.h"
#include "kernels/numerics/float8.h"

namespace qshard::cpu {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kRowsPerThread = 16;

/// Runs of values of one row: their amax, and their codes.
class Rows {
 public:
  explicit Rows(const PackedRowsTask& task)
      : task_(task),
        amax_(row_kernels().amax[static_cast<int>(task.value_dtype)]),
        encode_(is_e5m2() ? e5m2_row_kernels().encode[static_cast<int>(task.value_dtype)]
                          : row_kernels().encode[static_cast<int>(task.value_dtype)]) {}

  uint32_t amax_bits(int64_t row, int64_t begin, int64_t end) const {
    return amax_(values(row, begin), end - begin);
  }
  float scale(uint32_t amax_bits) const { return scale(bits_float(amax_bits)); }
  float scale(float amax) const {
    return scale_from_amax(amax, is_e5m2() ? kE5M2Max : kE4M3Max, task_.power_of_two);
  }
  void encode(int64_t row, int64_t begin, int64_t end, float scale) const {
    encode_(values(row, begin), end - begin, scale, task_.codes + row * task_.ld + begin);
  }
  void clear_rest(int64_t row) const {
    uint8_t* codes = task_.codes + row * task_.ld;
    std::fill(codes + (row < task_.rows ? task_.cols : 0), codes + task_.ld, uint8_t{0});
  }

 private:
  bool is_e5m2() const { return task_.code_dtype == DType::kFloat8E5M2; }
  const void* values(int64_t row, int64_t begin) const {
    return static_cast<const uint8_t*>(task_.values) +
           (row * task_.cols + begin) * value_size(task_.value_dtype);
  }

  const PackedRowsTask& task_;
  uint32_t (*amax_)(const void*, int64_t);
  void (*encode_)(const void*, int64_t, float, uint8_t*);
};

template <typename Run>
void for_each(int64_t count, int64_t per_thread, const Run& run) {
  at::parallel_for(0, count, per_thread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i);
  });
}

/// In blocks of one row and `width` columns: scale_inv (ceil(cols / width), padded_rows).
void quantize_in_rows(const PackedRowsTask& task, int64_t width) {
  const Rows rows(task);
  for_each(task.padded_rows, kRowsPerThread, [&](int64_t row) {
    for (int64_t begin = 0; begin < task.cols; begin += width) {
      const int64_t end = std::min(begin + width, task.cols);
      float scale = 1.f;
      if (row < task.rows) {
        scale = rows.scale(rows.amax_bits(row, begin, end));
        rows.encode(row, begin, end, scale);
      }
      task.scale_inv[begin / width * task.padded_rows + row] = inverse_scale(scale);
    }
    rows.clear_rest(row);
  });
}

}  // namespace

void quantize_packed_rows(const PackedRowsTask& task, float amax) {
  const Rows rows(task);
  const float scale = rows.scale(amax);
  *task.scale_inv = inverse_scale(scale);
  for_each(task.padded_rows, kRowsPerThread, [&](int64_t row) {
    if (row < task.rows) rows.encode(row, 0, task.cols, scale);
    rows.clear_rest(row);
  });
}

void quantize_packed_rows_1xk(const PackedRowsTask& task) { quantize_in_rows(task, task.cols); }

void quantize_packed_rows_1x128(const PackedRowsTask& task) { quantize_in_rows(task, kBlock); }

void quantize_packed_rows_128x128(const PackedRowsTask& task) {
  const Rows rows(task);
  const int64_t pitch = round_up(ceil_div(task.cols, kBlock), 4);
  for_each(ceil_div(task.rows, kBlock), 1, [&](int64_t block_row) {
    const int64_t first = block_row * kBlock;
    const int64_t last = std::min(first + kBlock, task.rows);
    float* scale_inv = task.scale_inv + block_row * pitch;
    std::fill(scale_inv, scale_inv + pitch, 0.f);
    for (int64_t begin = 0; begin < task.cols; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, task.cols);
      uint32_t amax = 0;
      for (int64_t row = first; row < last; ++row) {
        amax = std::max(amax, rows.amax_bits(row, begin, end));
      }
      const float scale = rows.scale(amax);
      scale_inv[begin / kBlock] = inverse_scale(scale);
      for (int64_t row = first; row < last; ++row) rows.encode(row, begin, end, scale);
    }
  });
  for_each(task.padded_rows, kRowsPerThread, [&](int64_t row) { rows.clear_rest(row); });
}

}  // namespace qshard::cpu
