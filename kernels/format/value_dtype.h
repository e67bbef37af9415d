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

}  // namespace qshard
