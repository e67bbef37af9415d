// Single values of a type that is known when the code runs, for loops of the CPU that no RowKernels
// has.
#pragma once

#include <cstdint>

#include "kernels/format/formats.h"
#include "kernels/numerics/float8.h"

namespace qshard::cpu {

/// values[i] of float32, bfloat16 or float16.
inline float load_value(const void* values, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(values)[i];
  const uint16_t bits = static_cast<const uint16_t*>(values)[i];
  return dtype == DType::kBFloat16 ? bfloat16_to_float(bits) : half_to_float(bits);
}

/// values[i] = x, rounded to that type.
inline void store_value(void* values, DType dtype, int64_t i, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(values)[i] = x;
  } else {
    static_cast<uint16_t*>(values)[i] =
        dtype == DType::kBFloat16 ? float_to_bfloat16(x) : float_to_half(x);
  }
}

}  // namespace qshard::cpu
