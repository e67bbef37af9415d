// Rows that hold their scales as packed codes, on the CPU, with the bits of the CUDA kernels'
// (kernels/activation/kernels.h), which say how scales lie.
#pragma once

#include <cstdint>

#include "kernels/format/formats.h"

namespace qshard::cpu {

/// Rows (rows, cols) of E4M3 codes, each with E8M0 scales from `scale_offset` on: one for 1x128, or
/// one alone. What lies beyond them is written as code 0.
struct RepackTask {
  const uint8_t* image = nullptr;
  int64_t pitch = 0;  // bytes from row to row
  int64_t scale_offset = 0;
  bool has_row_scale = false;  // one alone
  int64_t rows = 0;
  int64_t cols = 0;
  uint8_t* codes = nullptr;  // (padded_rows, ld)
  int64_t padded_rows = 0;
  int64_t ld = 0;
  float* scale_inv = nullptr;
};

/// The same codes and scales of 1x128: scale_inv (ceil(cols / 128), padded_rows).
void repack_rows(const RepackTask& task);
/// The scales of rows that have one alone: scale_inv (rows,).
void read_row_scales(const RepackTask& task);
/// Codes of the transpose (cols, rows), all 128x128 of them by the largest scale of their rows that
/// have any code but 0: scale_inv (ceil(rows / 128), padded_rows) for kBlock1x128, or (ceil(cols /
/// 128), round_up(ceil(rows / 128), 4)), the last ones zero, for kBlock128x128. Where rows have
/// one scale alone, all codes have the largest: scale_inv (1,) for kTensor, (padded_rows,) for
/// kRow.
void repack_columns(const RepackTask& task, ScaleMode mode);

}  // namespace qshard::cpu
