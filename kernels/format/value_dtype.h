// The kernels' names for torch's value types: what is quantized, and a quantized tensor's nominal
// dtype.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "kernels/format/formats.h"

namespace qshard {

inline bool is_value_dtype(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

/// @throws c10::Error unless float32, bfloat16 or float16.
inline DType value_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      TORCH_CHECK(false, "qshard: values must be float32, bfloat16 or float16, got ", type);
  }
}

/// Torch's name for the type of scales, or of codes; a byte for two codes of four bits.
inline at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kFloat8E4M3:
      return at::kFloat8_e4m3fn;
    case DType::kFloat8E5M2:
      return at::kFloat8_e5m2;
    case DType::kFloat8E8M0:
      return at::kFloat8_e8m0fnu;
    case DType::kFloat4E2M1:
      return at::kByte;
  }
  TORCH_CHECK(false, "qshard: no such element type");
}

}  // namespace qshard
