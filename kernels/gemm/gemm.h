// Matrix multiplication of scaled FP8 and FP4 codes through cuBLASLt (CUDA builds only).
#pragma once

#include <cstdint>

#include "kernels/format/formats.h"

namespace qshard {

/// `rows` rows of codes, each contracted over its first k codes.
struct ScaledOperand {
  const void* codes = nullptr;  // 16-byte aligned; E2M1 two to a byte, the first in the low nibble
  int64_t rows = 0;
  int64_t ld = 0;  // bytes from row to row, a multiple of 16
  DType dtype = DType::kFloat8E4M3;
  ScaleMode scale_mode = ScaleMode::kTensor;
  const void* scale_inv = nullptr;  // device memory, 16-byte aligned
};

/// out (a.rows, b.rows) = alpha * a @ b^T + bias + added, contiguous, summed in fp32.
struct ScaledGemm {
  ScaledOperand a;
  ScaledOperand b;
  int64_t k =
      0;  // 16 bytes of codes or a multiple; those beyond the operands' own columns are zero
  void* out = nullptr;
  DType out_dtype = DType::kBFloat16;
  const void* bias = nullptr;         // (b.rows,) of out_dtype, added to every row, or null
  bool fast_accumulate = false;       // Hopper's tensor cores keep fewer bits between promotions
  const float* alpha_zero = nullptr;  // device memory: alpha, then a zero; null: alpha is 1
  const void* added = nullptr;        // as out, or it; null, or without bias and alpha_zero
};

/// Runs on the current device and stream. Returns false, having launched nothing, if cuBLASLt has
/// no kernel for the device, shape, types or alignment.
/// @throws c10::Error if cuBLASLt fails otherwise.
bool scaled_gemm(const ScaledGemm& gemm);

}  // namespace qshard
