// FP8 scalar numerics shared by the CPU and CUDA kernels: bit casts, rounding, scale from amax.
//
// Integer and single IEEE operations only, so that every path (portable, AVX2, CUDA) agrees bit for
// bit. Formulas: test/reference/. Includes no torch header: .cu files use it.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define QSHARD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define QSHARD_HOST_DEVICE inline
#endif

namespace qshard {

constexpr uint32_t kAbsMask = 0x7fffffffu;
constexpr uint32_t kMantissaMask = 0x007fffffu;
constexpr uint32_t kInfBits = 0x7f800000u;
constexpr uint32_t kNaNBits = 0x7fc00000u;
constexpr float kE4M3Max = 448.f;
constexpr float kE5M2Max = 57344.f;

QSHARD_HOST_DEVICE uint32_t float_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

QSHARD_HOST_DEVICE float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

/// Every NaN becomes one NaN, so that an amax does not depend on payloads.
QSHARD_HOST_DEVICE uint32_t canonical_amax(uint32_t abs_bits) {
  return abs_bits > kInfBits ? kNaNBits : abs_bits;
}

QSHARD_HOST_DEVICE float canonical_nan(float x) { return x != x ? bits_float(kNaNBits) : x; }

/// scale = code_max / amax; 1 for 0, infinity and NaN; FLT_MAX on overflow; with `power_of_two`
/// rounded down to a power of two by clearing the mantissa.
QSHARD_HOST_DEVICE float scale_from_amax(float amax, float code_max, bool power_of_two) {
  const uint32_t bits = float_bits(amax);
  if (!(amax > 0.f) || bits >= kInfBits) return 1.f;
  if (power_of_two) {
    // The quotient's exponent without the division: the nearest quotient below a power of two never
    // rounds up to it, since one ulp of amax is more than half an ulp of the quotient.
    const uint32_t max_bits = float_bits(code_max);
    const bool borrows = (bits & kMantissaMask) > (max_bits & kMantissaMask);
    const int exponent = 127 + static_cast<int>(max_bits >> 23) - static_cast<int>(bits >> 23) -
                         static_cast<int>(borrows);
    const bool overflows = exponent > 254 || bits <= kMantissaMask;
    return bits_float(static_cast<uint32_t>(overflows ? 254 : exponent) << 23);
  }
#ifdef __CUDA_ARCH__
  const float scale = __fdiv_rn(code_max, amax);
#else
  const float scale = code_max / amax;
#endif
  return float_bits(scale) == kInfBits ? bits_float(kInfBits - 1) : scale;
}

/// The largest amax that has the scale of this one: whatever lies below need not raise it.
QSHARD_HOST_DEVICE float largest_of_same_scale(float amax, float code_max, bool power_of_two) {
  const uint32_t bits = float_bits(amax);
  if (!power_of_two || !(amax > 0.f) || bits <= kMantissaMask || bits >= kInfBits) return amax;
  const uint32_t max_mantissa = float_bits(code_max) & kMantissaMask;
  const bool carries = (bits & kMantissaMask) > max_mantissa;
  const uint32_t largest = (((bits >> 23) + static_cast<uint32_t>(carries)) << 23) | max_mantissa;
  return bits_float(largest < kInfBits ? largest : kInfBits - 1);
}

/// Correctly rounded 1 / scale; subnormal results are kept.
QSHARD_HOST_DEVICE float inverse_scale(float scale) {
  const uint32_t bits = float_bits(scale);
  const uint32_t exponent = bits >> 23;
  if ((bits & kMantissaMask) == 0 && exponent > 0 && exponent < 254) {
    return bits_float((254u - exponent) << 23);
  }
#ifdef __CUDA_ARCH__
  return __fdiv_rn(1.f, scale);
#else
  return 1.f / scale;
#endif
}

/// Nearest-even code of x with `kMantissa` mantissa bits; saturates at kMaxCode; NaN is 0x7f; the
/// sign is kept, NaN's and zero's too.
template <int kMantissa, int kBias, uint32_t kMaxCode>
QSHARD_HOST_DEVICE uint8_t encode_float8(float x) {
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23;
  // Adding this power of two leaves a subnormal result's code, rounded to nearest even, in the low
  // bits: its ulp is the smallest subnormal.
  constexpr uint32_t kMagic = static_cast<uint32_t>(128 - kBias + kShift) << 23;
  const uint32_t bits = float_bits(x);
  const uint32_t abs = bits & kAbsMask;
  const uint32_t sign = (bits >> 24) & 0x80u;
  if (abs > kInfBits) return static_cast<uint8_t>(sign | 0x7fu);
  uint32_t code;
  if (abs < kMinNormal) {
    code = float_bits(bits_float(abs) + bits_float(kMagic)) - kMagic;
  } else {
    const uint32_t half = (1u << (kShift - 1)) - 1;
    code = (abs + half + ((abs >> kShift) & 1u) - (static_cast<uint32_t>(127 - kBias) << 23)) >>
           kShift;
    if (code > kMaxCode) code = kMaxCode;
  }
  return static_cast<uint8_t>(sign | code);
}

QSHARD_HOST_DEVICE uint8_t encode_e4m3(float x) { return encode_float8<3, 7, 0x7e>(x); }
QSHARD_HOST_DEVICE uint8_t encode_e5m2(float x) { return encode_float8<2, 15, 0x7b>(x); }

/// Code without its sign of the magnitude with fp32 bits `abs`, stochastically rounded: what lies
/// between two codes becomes the upper one with the probability of its distance from the lower one,
/// in ulps. That is where the 24 high bits of `random`, taken as a fraction, are below the
/// distance. Saturates at kMaxCode, NaN too.
template <int kMantissa, int kBias, uint32_t kMaxCode>
QSHARD_HOST_DEVICE uint32_t stochastic_magnitude(uint32_t abs, uint32_t random) {
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23;
  const uint32_t draw = random >> 8;
  if (abs < kMinNormal) {
    // In ulps of the subnormal codes; all of it is exact, the distance below 1 too.
    constexpr auto kUlpsPerOne = static_cast<float>(1u << (kBias - 1 + kMantissa));
    const float ulps = bits_float(abs) * kUlpsPerOne;
    const auto lower = static_cast<uint32_t>(ulps);
    const float distance = ulps - static_cast<float>(lower);
    return lower + (static_cast<float>(draw) * 0x1p-24f < distance ? 1u : 0u);
  }
  const uint32_t lower = (abs - (static_cast<uint32_t>(127 - kBias) << 23)) >> kShift;
  const uint32_t distance = (abs & ((1u << kShift) - 1)) << (24 - kShift);  // times 2^24
  const uint32_t code = lower + (draw < distance ? 1u : 0u);
  return code > kMaxCode ? kMaxCode : code;
}

/// encode_float8 with stochastic rounding: NaN is 0x7f; the sign is kept, NaN's and zero's too.
template <int kMantissa, int kBias, uint32_t kMaxCode>
QSHARD_HOST_DEVICE uint8_t encode_float8_stochastic(float x, uint32_t random) {
  const uint32_t bits = float_bits(x);
  const uint32_t abs = bits & kAbsMask;
  const uint32_t sign = (bits >> 24) & 0x80u;
  if (abs > kInfBits) return static_cast<uint8_t>(sign | 0x7fu);
  return static_cast<uint8_t>(sign | stochastic_magnitude<kMantissa, kBias, kMaxCode>(abs, random));
}

QSHARD_HOST_DEVICE uint8_t encode_e4m3_stochastic(float x, uint32_t random) {
  return encode_float8_stochastic<3, 7, 0x7e>(x, random);
}
QSHARD_HOST_DEVICE uint8_t encode_e5m2_stochastic(float x, uint32_t random) {
  return encode_float8_stochastic<2, 15, 0x7b>(x, random);
}

/// Exact value of an E4M3 code; NaN keeps its sign.
QSHARD_HOST_DEVICE float decode_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return bits_float(sign | kNaNBits);
  // As an fp32 whose exponent is 120 too small; the product by 2^120 is exact. Below the smallest
  // normal fp32 the operand would be subnormal, so those eight codes convert from the integer.
  const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                    : bits_float((magnitude << 20) + (120u << 23));
  return bits_float(float_bits(value) | sign);
}

QSHARD_HOST_DEVICE float bfloat16_to_float(uint16_t bits) {
  return bits_float(static_cast<uint32_t>(bits) << 16);
}

/// Nearest even; a NaN keeps its sign and becomes quiet.
QSHARD_HOST_DEVICE uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & kAbsMask) > kInfBits) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// Exact, subnormals included.
QSHARD_HOST_DEVICE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude > 0x7c00u) return bits_float(sign | kNaNBits | (magnitude << 13));
  if (magnitude == 0x7c00u) return bits_float(sign | kInfBits);
  const float value = magnitude < 0x400u ? static_cast<float>(magnitude) * 0x1p-24f
                                         : bits_float((magnitude << 13) + (112u << 23));
  return bits_float(float_bits(value) | sign);
}

/// Exact value of an E5M2 code; NaN keeps its sign.
QSHARD_HOST_DEVICE float decode_e5m2(uint8_t code) {
  if ((code & 0x7fu) > 0x7cu) {
    return bits_float((static_cast<uint32_t>(code & 0x80u) << 24) | kNaNBits);
  }
  return half_to_float(static_cast<uint16_t>(code << 8));
}

/// Nearest even; overflow is infinity; a NaN keeps its sign and becomes quiet.
QSHARD_HOST_DEVICE uint16_t float_to_half(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t abs = bits & kAbsMask;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  if (abs > kInfBits) return static_cast<uint16_t>(sign | 0x7e00u | ((abs >> 13) & 0x3ffu));
  if (abs >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (abs < 0x38800000u) {
    constexpr uint32_t kMagic = 126u << 23;  // 0.5: its ulp is 2^-24
    return static_cast<uint16_t>(sign | (float_bits(bits_float(abs) + 0.5f) - kMagic));
  }
  return static_cast<uint16_t>(sign | ((abs + 0xfffu + ((abs >> 13) & 1u) - (112u << 23)) >> 13));
}

}  // namespace qshard
