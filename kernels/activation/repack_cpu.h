// Rows that hold their scales as packed codes, on the CPU, with the bits of the CUDA kernels'
// (kernels/activation/kernels.h), which say how scales lie.
#pragma once

#include <cstdint>

namespace qshard::cpu {

/// Rows (rows, cols) of E4M3 codes, each with an E8M0 scale for 1x128 from `scale_offset` on. What
/// lies beyond them is written as code 0.
struct RepackTask {
  const uint8_t* image = nullptr;
  int64_t pitch = 0;  // bytes from row to row
  int64_t scale_offset = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  uint8_t* codes = nullptr;  // (padded_rows, ld)
  int64_t padded_rows = 0;
  int64_t ld = 0;
  float* scale_inv = nullptr;
};

/// The same codes and scales: scale_inv (ceil(cols / 128), padded_rows).
void repack_rows(const RepackTask& task);
/// Codes of the transpose (cols, rows), all 128x128 of them by the largest scale of their rows that
/// have any code but 0: scale_inv (ceil(rows / 128), padded_rows) or, with `square`, (ceil(cols /
/// 128), round_up(ceil(rows / 128), 4)), the last ones zero.
void repack_columns(const RepackTask& task, bool square);

}  // namespace qshard::cpu
