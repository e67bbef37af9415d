// Packed codes of activations on the CPU, with the bits of the CUDA kernels'
// (kernels/activation/kernels.h), which say how scales lie. One orientation at a time: columns are
// the rows of the transpose.
#pragma once

#include <cstdint>

#include "kernels/format/formats.h"

namespace qshard::cpu {

/// Codes of values (rows, cols), contiguous. What lies beyond them is written as code 0.
struct PackedRowsTask {
  const void* values = nullptr;
  DType value_dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t cols = 0;
  DType code_dtype = DType::kFloat8E4M3;  // or E5M2
  bool power_of_two = true;
  uint8_t* codes = nullptr;  // (padded_rows, ld)
  int64_t padded_rows = 0;
  int64_t ld = 0;
  float* scale_inv = nullptr;
};

/// By one scale, of an amax that is given.
void quantize_packed_rows(const PackedRowsTask& task, float amax);
/// By one scale per row: scale_inv (padded_rows,).
void quantize_packed_rows_1xk(const PackedRowsTask& task);
/// In blocks of 1x128: scale_inv (ceil(cols / 128), padded_rows).
void quantize_packed_rows_1x128(const PackedRowsTask& task);
/// In blocks of 128x128: scale_inv (ceil(rows / 128), round_up(ceil(cols / 128), 4)), the last ones
/// zero.
void quantize_packed_rows_128x128(const PackedRowsTask& task);

}  // namespace qshard::cpu
