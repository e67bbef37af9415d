// Numerics of row-local block scales and of FP4 codes, shared by the CPU and CUDA kernels: E8M0
// (MXFP8), E4M3 under an fp32 tensor scale (NVFP4), E2M1. As in float8.h: bit for bit on every
// path.
#pragma once

#include <stdexcept>

#include "kernels/format/formats.h"
#include "kernels/numerics/float8.h"

namespace qshard {

/// Arithmetic of scales of one byte.
enum class RowScale : uint8_t {
  kE8M0 = 1,        // 2^(byte - 127); 255 is NaN (OCP MX v1.0)
  kE4M3 = 2,        // times the matrix's own fp32 scale (NVFP4)
  kE8M0AsFp32 = 3,  // kE8M0 of the power of two that an fp32 scale would be (ScaleLevel::as_fp32)
};

/// @throws std::invalid_argument for scales of more bytes.
inline RowScale row_scale_of(const ScaleLevel& scale) {
  if (scale.dtype == DType::kFloat8E8M0) {
    return scale.as_fp32 ? RowScale::kE8M0AsFp32 : RowScale::kE8M0;
  }
  if (scale.dtype == DType::kFloat8E4M3) return RowScale::kE4M3;
  throw std::invalid_argument("qshard: scales in rows are E8M0 or E4M3");
}

constexpr float kE2M1Max = 6.f;
constexpr uint8_t kE8M0NaN = 0xff;
constexpr uint8_t kE8M0One = 0x7f;
constexpr uint8_t kE4M3NaN = 0x7f;

/// e8m0 = ceil(log2(amax / 448)) + 127, so that no element of the block exceeds 448. Clamped to
/// [0, 254]: 0 for amax 0, 254 for infinity; 255 for NaN.
QSHARD_HOST_DEVICE uint8_t e8m0_from_amax(float amax) {
  const uint32_t bits = float_bits(amax) & kAbsMask;
  if (bits >= kInfBits) return bits == kInfBits ? 0xfe : kE8M0NaN;
  // 448 = 1.75 * 2^8: the quotient's exponent is 8 less, and rounds up past a mantissa of 1.75.
  const int exponent = static_cast<int>(bits >> 23) - 8 + ((bits & kMantissaMask) > 0x600000u);
  return static_cast<uint8_t>(exponent < 0 ? 0 : exponent);
}

/// inverse_scale(scale_from_amax(amax, 448, power_of_two=true)): the same, but 1 for 0, infinity
/// and NaN.
QSHARD_HOST_DEVICE uint8_t e8m0_as_fp32(float amax) {
  const bool has_scale = amax > 0.f && float_bits(amax) < kInfBits;
  return has_scale ? e8m0_from_amax(amax) : kE8M0One;
}

/// 2^(e - 127), NaN for 255.
QSHARD_HOST_DEVICE float e8m0_to_float(uint8_t e) {
  if (e == kE8M0NaN) return bits_float(kNaNBits);
  return bits_float(e == 0 ? 0x00400000u : static_cast<uint32_t>(e) << 23);
}

/// What a block's values are multiplied by: 2^(127 - e), and 1 for a NaN scale.
QSHARD_HOST_DEVICE float e8m0_encode_scale(uint8_t e) {
  return e == kE8M0NaN ? 1.f : e8m0_to_float(static_cast<uint8_t>(254 - e));
}

/// Code times block scale of the largest value of an NVFP4 matrix: 6 * 448, and 6 * 256 = 4 * 384
/// where a block may end in code 4 (Format::four_over_six).
QSHARD_HOST_DEVICE constexpr float nvfp4_range(bool four_over_six) {
  return kE2M1Max * (four_over_six ? 256.f : kE4M3Max);
}

/// Codes of E4M3 whose scale becomes 2^20 times as large or more are 0: 448 * 2^-20 rounds to it.
constexpr int kMostShift = 20;
/// What codes with the E8M0 scale `own` are multiplied by, to have the scale `larger`; 1 where that
/// is not so.
QSHARD_HOST_DEVICE float rescaling(uint8_t own, uint8_t larger) {
  const int shift = static_cast<int>(larger) - static_cast<int>(own);
  const int used = shift < 0 ? 0 : shift > kMostShift ? kMostShift : shift;
  return bits_float(static_cast<uint32_t>(127 - used) << 23);
}

/// NVFP4's tensor scale_inv: amax / range rounded to 16 significant bits, to nearest even; 1 for 0,
/// infinity and NaN, and where it would round to 0. With so few bits range * scale_inv is exact in
/// fp32, so quantizing dequantized values again finds the same scale.
QSHARD_HOST_DEVICE float nvfp4_tensor_scale_inv(float amax, float range = nvfp4_range(false)) {
  const uint32_t amax_bits = float_bits(amax);
  if (!(amax > 0.f) || amax_bits >= kInfBits) return 1.f;
#ifdef __CUDA_ARCH__
  const float quotient = __fdiv_rn(amax, range);
#else
  const float quotient = amax / range;
#endif
  const uint32_t bits = float_bits(quotient);
  const uint32_t rounded = (bits + 0x7fu + ((bits >> 8) & 1u)) & ~0xffu;
  return rounded == 0 ? 1.f : bits_float(rounded);
}

/// NVFP4's S = 1 / scale_inv, at most FLT_MAX.
QSHARD_HOST_DEVICE float nvfp4_tensor_scale(float scale_inv) {
  const float scale = inverse_scale(scale_inv);
  return float_bits(scale) == kInfBits ? bits_float(kInfBits - 1) : scale;
}

/// S / 6: times a block's amax it is the block's scale, before rounding to E4M3. `largest_code`: of
/// the block.
QSHARD_HOST_DEVICE float nvfp4_amax_factor(float tensor_scale, float largest_code = kE2M1Max) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(tensor_scale, largest_code);
#else
  return tensor_scale / largest_code;
#endif
}

/// E4M3 scale of a block, never negative; NaN for a NaN amax, saturated to 448 for infinity.
QSHARD_HOST_DEVICE uint8_t nvfp4_block_scale(float amax, float amax_factor) {
#ifdef __CUDA_ARCH__
  return encode_e4m3(__fmul_rn(amax, amax_factor)) & 0x7fu;
#else
  return encode_e4m3(amax * amax_factor) & 0x7fu;
#endif
}

/// What a block's values are multiplied by: S / block scale, at most FLT_MAX; 0 for a zero scale
/// and 1 for a NaN one.
QSHARD_HOST_DEVICE float nvfp4_encode_scale(uint8_t block_scale, float tensor_scale) {
  if (block_scale == 0) return 0.f;
  if (block_scale == kE4M3NaN) return 1.f;
#ifdef __CUDA_ARCH__
  const float scale = __fdiv_rn(tensor_scale, decode_e4m3(block_scale));
#else
  const float scale = tensor_scale / decode_e4m3(block_scale);
#endif
  return float_bits(scale) == kInfBits ? bits_float(kInfBits - 1) : scale;
}

/// What a block's codes are multiplied by.
QSHARD_HOST_DEVICE float nvfp4_decode_scale(uint8_t block_scale, float tensor_scale_inv) {
#ifdef __CUDA_ARCH__
  return canonical_nan(__fmul_rn(decode_e4m3(block_scale), tensor_scale_inv));
#else
  return canonical_nan(decode_e4m3(block_scale) * tensor_scale_inv);
#endif
}

/// The two scales of a block of `kind` from its amax; `tensor_scale` is NVFP4's S.
struct BlockScale {
  uint8_t byte;  // in the row image
  float encode;  // values are multiplied by it
};
QSHARD_HOST_DEVICE BlockScale block_scale(RowScale kind, float amax, float tensor_scale,
                                          float largest_code = kE2M1Max) {
  if (kind != RowScale::kE4M3) {
    const uint8_t byte = kind == RowScale::kE8M0 ? e8m0_from_amax(amax) : e8m0_as_fp32(amax);
    return {byte, e8m0_encode_scale(byte)};
  }
  const uint8_t byte = nvfp4_block_scale(amax, nvfp4_amax_factor(tensor_scale, largest_code));
  return {byte, nvfp4_encode_scale(byte, tensor_scale)};
}

/// scale_inv of a block from its byte; NaN is kNaNBits.
QSHARD_HOST_DEVICE float block_scale_inv(RowScale kind, uint8_t byte, float tensor_scale_inv) {
  return kind == RowScale::kE4M3 ? nvfp4_decode_scale(byte, tensor_scale_inv) : e8m0_to_float(byte);
}

/// Nearest-even E2M1 code (4 bits) of x, saturating at 6; NaN is 7; the sign is kept, NaN's and
/// zero's too.
QSHARD_HOST_DEVICE uint8_t encode_e2m1(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t abs = bits & kAbsMask;
  const uint32_t sign = (bits >> 28) & 0x8u;
  uint32_t code;
  if (abs < 0x3f800000u) {
    // Below 1 codes are multiples of 0.5: the ulp of 2^22.
    constexpr uint32_t kMagic = 149u << 23;
    code = float_bits(bits_float(abs) + bits_float(kMagic)) - kMagic;
  } else {
    const uint32_t capped = abs > 0x40c00000u ? 0x40c00000u : abs;  // 6, NaN too
    code = (capped + 0x1fffffu + ((capped >> 22) & 1u) - (126u << 23)) >> 22;
  }
  return static_cast<uint8_t>(sign | code);
}

/// encode_e2m1 with stochastic rounding (stochastic_magnitude).
QSHARD_HOST_DEVICE uint8_t encode_e2m1_stochastic(float x, uint32_t random) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = (bits >> 28) & 0x8u;
  return static_cast<uint8_t>(sign | stochastic_magnitude<1, 1, 7>(bits & kAbsMask, random));
}

/// Exact value of a 4-bit E2M1 code.
QSHARD_HOST_DEVICE float decode_e2m1(uint8_t code) {
  const uint32_t magnitude = code & 7u;
  const uint32_t sign = static_cast<uint32_t>(code & 8u) << 28;
  // 0 and 0.5 are below the smallest normal; others are an fp32 whose exponent is 126 too small.
  const uint32_t bits =
      magnitude < 2 ? (magnitude ? 0x3f000000u : 0u) : (magnitude << 22) + (126u << 23);
  return bits_float(bits | sign);
}

/// Squared error of a value whose block has this scale, in units of the tensor scale_inv, where
/// neither over- nor underflow reaches it. The code times its scale is exact.
QSHARD_HOST_DEVICE float nvfp4_squared_error(float x, const BlockScale& scale, float tensor_scale) {
#ifdef __CUDA_ARCH__
  const float code = decode_e2m1(encode_e2m1(__fmul_rn(x, scale.encode)));
  const float error =
      __fsub_rn(__fmul_rn(code, decode_e4m3(scale.byte)), __fmul_rn(x, tensor_scale));
  return __fmul_rn(error, error);
#else
  const float code = decode_e2m1(encode_e2m1(x * scale.encode));
  const float error = code * decode_e4m3(scale.byte) - x * tensor_scale;
  return error * error;
#endif
}

/// Adds errors up in pairs of neighbours, the sums in pairs again: the same order on every path.
template <int kCount>
QSHARD_HOST_DEVICE float sum_in_pairs(float (&errors)[kCount]) {
  static_assert((kCount & (kCount - 1)) == 0);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int distance = 1; distance < kCount; distance *= 2) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < kCount; i += 2 * distance) errors[i] += errors[i + distance];
  }
  return errors[0];
}

/// The scales of a block of NVFP4 whose largest value becomes code 6, and code 4.
struct FourOverSix {
  BlockScale six;
  BlockScale four;

  QSHARD_HOST_DEVICE FourOverSix(float amax, float tensor_scale)
      : six(block_scale(RowScale::kE4M3, amax, tensor_scale)),
        four(block_scale(RowScale::kE4M3, amax, tensor_scale, 4.f)) {}

  /// Returns the scale with the smaller error, and that of code 6 if the errors are equal or NaN.
  QSHARD_HOST_DEVICE const BlockScale& better(float error_of_six, float error_of_four) const {
    return error_of_four < error_of_six ? four : six;
  }
};

}  // namespace qshard
