// Arithmetic of NVFP4's messages of gradients without branches and divisions, for the range that
// nearly all tiles are in: bit for bit that of row_scales.h, which is slower and has no bounds.
#pragma once

#include <algorithm>

#include "kernels/numerics/rounded.h"
#include "kernels/numerics/row_scales.h"

namespace qshard {

namespace detail {

QSHARD_HOST_DEVICE uint32_t smallest(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
  return min(min(a, b), c);
#else
  return std::min({a, b, c});
#endif
}

}  // namespace detail

/// Within 2^-22 of 1 / x, of normal x with a normal inverse.
QSHARD_HOST_DEVICE float approximate_inverse(float x) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#else
  return 1.f / x;
#endif
}

/// a / b to nearest even, from 1 / b within 2^-20, where b has 5 significant bits or fewer and
/// nothing here underflows or overflows: the residual is exact, and so few bits leave a quotient
/// that is not exact at least 1/62 of an ulp from where rounding turns.
QSHARD_HOST_DEVICE float divide_by_few_bits(float a, float b, float inverse) {
  const float quotient = detail::multiply(a, inverse);
  const float residual = detail::multiply_add(-quotient, b, a);
  return detail::multiply_add(residual, inverse, quotient);
}

/// The scales of a tile whose amax is_ordinary_tile().
struct Nvfp4TileScales {
  float scale_inv;    // nvfp4_tensor_scale_inv
  float scale;        // nvfp4_tensor_scale
  float amax_factor;  // nvfp4_amax_factor
};

/// Whether nothing of a tile with these fp32 bits of the amax underflows or overflows.
QSHARD_HOST_DEVICE bool is_ordinary_tile(uint32_t amax) {
  constexpr uint32_t kLeast = (127u - 60) << 23, kMost = (127u + 60) << 23;
  return amax - kLeast < kMost - kLeast;
}

QSHARD_HOST_DEVICE Nvfp4TileScales ordinary_tile_scales(uint32_t amax) {
  constexpr float kCodeMax = kE2M1Max * kE4M3Max;  // 21 * 2^7
  Nvfp4TileScales of;
  const uint32_t bits = float_bits(divide_by_few_bits(bits_float(amax), kCodeMax, 1 / kCodeMax));
  of.scale_inv = bits_float((bits + 0x7fu + ((bits >> 8) & 1u)) & ~0xffu);
  // 16 significant bits: again the residual is exact and the inverse 2^-18 ulp from any turn.
  const float inverse = approximate_inverse(of.scale_inv);
  const float residual = detail::multiply_add(-inverse, of.scale_inv, 1.f);
  of.scale = detail::multiply_add(residual, inverse, inverse);
  of.amax_factor = divide_by_few_bits(of.scale, kE2M1Max, 1 / kE2M1Max);
  return of;
}

/// E2M1 code of a magnitude below 7 (nearest even), plus kE2M1Bias.
///
/// The code is the least of 2x, x + 2 and x / 2 + 4, of which each is the line of one range; at
/// 2^23 fp32 rounds them to integers.
constexpr uint32_t kE2M1Bias = 150u << 23;
QSHARD_HOST_DEVICE uint32_t biased_e2m1(float magnitude) {
  constexpr float kOne = 0x1p23f;  // whose ulp is 1
  return detail::smallest(float_bits(detail::multiply_add(magnitude, 2.f, kOne)),
                          float_bits(detail::add(magnitude, kOne + 2)),
                          float_bits(detail::multiply_add(magnitude, 0.5f, kOne + 4)));
}

/// Whether x * decode scale of every code x is exact, so that adding it rounds once, whether fused
/// or not: scales of at most 16 significant bits (nvfp4_tensor_scale_inv), far from fp32's ends.
QSHARD_HOST_DEVICE bool has_exact_products(float tile_scale_inv) {
  const uint32_t bits = float_bits(tile_scale_inv);
  constexpr uint32_t kLeast = (127u - 90) << 23, kMost = (127u + 90) << 23;
  return bits - kLeast < kMost - kLeast && (bits & 0xffu) == 0;
}

/// Four E2M1 codes, every second nibble of `codes` from `kFirst` (0 or 1) on, as E4M3 codes of 2^-6
/// of their values, one to a byte: both have a subnormal exponent of 0.
template <int kFirst>
QSHARD_HOST_DEVICE uint32_t e2m1_as_e4m3(uint32_t codes) {
  const uint32_t magnitudes = kFirst == 0 ? codes << 2 : codes >> 2;
  const uint32_t signs = kFirst == 0 ? codes << 4 : codes;
  return (magnitudes & 0x1c1c1c1cu) | (signs & 0x80808080u);
}

}  // namespace qshard
