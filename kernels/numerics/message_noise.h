// Stochastic rounding of gradients in messages: random bits are most of what it costs, so a value
// has 24 bits of which it shares 16 with its neighbours, of a generator of 7 rounds.
//
// Values 16 k to 16 k + 15 share the output of Philox 4x32-7 for the counter k, with the key and
// the count of kernels/numerics/random_words.h. (7 rounds of Philox 4x32 pass BigCrush: Salmon et
// al., "Parallel random numbers: as easy as 1, 2, 3", 2011.) Four values share a word: the noise of
// value j of these is the word's byte j, followed by the next two, the first again after the last.
//
// A magnitude times its scale, not yet rounded, lies at some distance above a code, in steps of
// this code and the next. It becomes the next one where distance and noise / 2^24 add up to 1, with
// the distance rounded up to what fp32 holds below a code's mantissa: 2^-22 of a step of E2M1,
// 2^-20 of E4M3. Noise is uniform over its 24 bits, so that a code is right on average within
// these. Neighbours are not independent: one's noise has another's 8 highest bits as its middle
// ones, which decide once in 256 times, so that their errors correlate by about 2^-8 at most.
#pragma once

#include <cmath>

#include "kernels/numerics/random_words.h"
#include "kernels/numerics/row_scales.h"

namespace qshard {

constexpr int kNoiseRounds = 7;
/// Values that share a counter.
constexpr int kNoiseValues = 16;

/// The 24 bits of value `i` (0 to 3) of a word.
QSHARD_HOST_DEVICE uint32_t noise_of_word(uint32_t word, int i) {
#ifdef __CUDA_ARCH__
  const int next = (i + 1) % 4, last = (i + 2) % 4;
  return __byte_perm(word, 0, 0x4000 | i << 8 | next << 4 | last);
#else
  const auto byte = [&](int j) { return word >> (8 * (j % 4)) & 0xffu; };
  return byte(i) << 16 | byte(i + 1) << 8 | byte(i + 2);
#endif
}

/// |x| * scale, rounded up.
QSHARD_HOST_DEVICE float product_up(float x, float scale) {
#ifdef __CUDA_ARCH__
  return __fmul_ru(fabsf(x), scale);
#else
  const double product = std::fabs(static_cast<double>(x)) * scale;
  const auto nearest = static_cast<float>(product);
  return nearest < product ? std::nextafter(nearest, HUGE_VALF) : nearest;
#endif
}

/// The word that rounds as noise does: a value goes up where the word's 24 high bits are below its
/// distance.
template <int kMantissa>
QSHARD_HOST_DEVICE uint32_t word_of_noise(uint32_t noise) {
  constexpr uint32_t kBelow = (1u << (kMantissa + 1)) - 1;  // of 24 bits, what fp32 has no room for
  return ~(noise | kBelow) << 8;
}

/// Codes of x * scale; NaN is all ones, the sign is kept, and what is above the largest becomes it.
QSHARD_HOST_DEVICE uint32_t encode_e4m3_with_noise(float x, float scale, uint32_t noise) {
  const uint32_t code = encode_e4m3_stochastic(product_up(x, scale), word_of_noise<3>(noise));
  return (code & 0x7fu) | (float_bits(x) >> 24 & 0x80u);
}
QSHARD_HOST_DEVICE uint32_t encode_e2m1_with_noise(float x, float scale, uint32_t noise) {
  const uint32_t code = encode_e2m1_stochastic(product_up(x, scale), word_of_noise<1>(noise));
  return (code & 0x7u) | (float_bits(x) >> 28 & 0x8u);
}

// The same without branches. fp32 has subnormals as codes have: at a scale that gives the least
// normal code fp32's least normal exponent, the code is what lies above its other mantissa bits,
// and a sum of integers rounds it.

/// E4M3 code of a magnitude of at most 448, 2^-120 of which is `product`, in bits 24 to 30; those
/// below are arbitrary.
constexpr float kE4M3AsFloat = 0x1p-120f;
QSHARD_HOST_DEVICE uint32_t high_e4m3_with_noise(float product, uint32_t noise) {
  return (float_bits(product) << 4) + noise;
}

/// E2M1 code of a magnitude below 7, 2^-126 of which is `product`, in bits 24 to 27: 8 for 7, too;
/// those below are arbitrary.
constexpr float kE2M1AsFloat = 0x1p-126f;
QSHARD_HOST_DEVICE uint32_t high_e2m1_with_noise(float product, uint32_t noise) {
  return (float_bits(product) << 2) + noise;
}

/// Scales of 1 and less, times kE2M1AsFloat, would be subnormal. So values are multiplied by this
/// first, and scales by the rest, in tiles that is_movable_tile(): there no scale gets out of
/// range, and a value that loses bits by it comes to less than 2^-22 of a step, rounded up to that.
constexpr float kMovedValue = 0x1p-32f;
QSHARD_HOST_DEVICE bool is_movable_tile(uint32_t amax) {
  constexpr uint32_t kLeast = (127u - 50) << 23, kMost = (127u + 34) << 23;
  return amax - kLeast < kMost - kLeast;
}

}  // namespace qshard
