// Single operations that are rounded to nearest, and that no compiler joins or reorders.
#pragma once

#include <cmath>

#include "kernels/numerics/float8.h"

namespace qshard::detail {

QSHARD_HOST_DEVICE float multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

QSHARD_HOST_DEVICE float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

QSHARD_HOST_DEVICE double multiply(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

QSHARD_HOST_DEVICE float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

}  // namespace qshard::detail
