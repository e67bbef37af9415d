// The 16-point random Hadamard transform of NVFP4's wgrad operands, shared by the CPU and CUDA
// kernels: bit for bit on every path. Includes no torch header: .cu files use it.
#pragma once

#include "kernels/numerics/float8.h"

// Arrays stay in registers only if every loop over them is unrolled.
#ifdef __CUDA_ARCH__
#define QSHARD_UNROLL _Pragma("unroll")
#else
#define QSHARD_UNROLL
#endif

namespace qshard {

constexpr int kHadamardSize = 16;

/// Signs s = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], bit j set where s[j] is
/// -1. They are those of TransformerEngine's wgrad operands (get_wgrad_sign_vector in
/// transformer_engine/pytorch/tensor/nvfp4_tensor.py).
constexpr uint32_t kHadamardSigns = 0xd7e8u;

/// Replaces x by y[i] = 1/4 * sum over j of H[i][j] * s[j] * x[j]; H is Sylvester's matrix, whose
/// entry is -1 where i & j has an odd number of bits. The transform is orthonormal: products of two
/// transformed vectors are those of the vectors, so a GEMM may contract over it unseen, while an
/// outlier is spread over 16 values. Each NaN becomes kNaNBits.
QSHARD_HOST_DEVICE void random_hadamard(float (&x)[kHadamardSize]) {
  QSHARD_UNROLL
  for (int j = 0; j < kHadamardSize; ++j) {
    x[j] = bits_float(float_bits(x[j]) ^ ((kHadamardSigns >> j & 1u) << 31));
  }
  QSHARD_UNROLL
  for (int distance = 1; distance < kHadamardSize; distance *= 2) {
    QSHARD_UNROLL
    for (int i = 0; i < kHadamardSize; ++i) {
      if (i & distance) continue;
      const float a = x[i];
      const float b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
  QSHARD_UNROLL
  for (int i = 0; i < kHadamardSize; ++i) x[i] = canonical_nan(x[i] * 0.25f);
}

#undef QSHARD_UNROLL

}  // namespace qshard
