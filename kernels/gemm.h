// FP8 matrix multiplication through cuBLASLt (CUDA builds only).
#pragma once

#include <cstdint>

#include "kernels/formats.h"

namespace qshard {

enum class ScaleMode : uint8_t {
  kTensor,        // one scale_inv
  kBlock1x128,    // (ceil(k / 128), rows): one per row and 128 contracted elements
  kBlock128x128,  // (ceil(rows / 128), round_up(ceil(k / 128), 4))
};

/// `rows` rows of codes, each contracted over its first k codes.
struct Fp8Operand {
  const void* codes = nullptr;  // 16-byte aligned
  int64_t rows = 0;
  int64_t ld = 0;  // bytes from row to row, a multiple of 16
  DType dtype = DType::kFloat8E4M3;
  ScaleMode scale_mode = ScaleMode::kTensor;
  const float* scale_inv = nullptr;  // device memory, 16-byte aligned
};

/// out (a.rows, b.rows) = a @ b^T, contiguous, accumulated in fp32.
struct Fp8Gemm {
  Fp8Operand a;
  Fp8Operand b;
  int64_t k = 0;  // a multiple of 16; codes beyond the operands' own columns are zero
  void* out = nullptr;
  DType out_dtype = DType::kBFloat16;
  const void* bias = nullptr;    // (b.rows,) of out_dtype, added to every row, or null
  bool fast_accumulate = false;  // Hopper's tensor cores keep fewer bits between promotions
};

/// Runs on the current device and stream. Returns false, having launched nothing, if cuBLASLt has
/// no kernel for the shape, types or alignment.
/// @throws c10::Error if cuBLASLt fails otherwise.
bool fp8_gemm(const Fp8Gemm& gemm);

}  // namespace qshard
