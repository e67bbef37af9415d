// The arithmetic of cross entropy that the CPU and CUDA kernels share: single IEEE operations in a
// stated order, so that both compute the same bits. Includes no torch header: .cu files use it.
//
// A row's logits are summed by 256 lanes: eight neighbours are a chunk, and chunk i is lane
// i % 256's. A lane adds its chunks in their order; then lanes 128 apart are merged, 64 apart, and
// so on.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/numerics/rounded.h"

namespace qshard {

constexpr int kSoftmaxLanes = 256;
constexpr int kSoftmaxChunk = 8;
constexpr float kLowest = -3.402823466e38f;

/// The larger one; `a` is no NaN, and is what a NaN leaves.
QSHARD_HOST_DEVICE float larger(float a, float b) {
#ifdef __CUDA_ARCH__
  return fmaxf(a, b);
#else
  return b > a ? b : a;
#endif
}

/// exp(x) of an x of at most about 0, within 2 ulps; 0 below -87, where less than 2^-125 is left.
QSHARD_HOST_DEVICE float exp_of(float x) {
  if (x < -87.f) return 0.f;
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: its ulp is 1
  const float shifted = fmaf(x, 1.44269504f, kMagic);
  const float rest = fmaf(shifted - kMagic, -0.693147182f, x);
  float power = 1.f / 720;
  power = fmaf(power, rest, 1.f / 120);
  power = fmaf(power, rest, 1.f / 24);
  power = fmaf(power, rest, 1.f / 6);
  power = fmaf(power, rest, 0.5f);
  power = fmaf(power, rest, 1.f);
  power = fmaf(power, rest, 1.f);
  return detail::multiply(power, bits_float((float_bits(shifted) << 23) + (127u << 23)));
}

/// log(x) of a float x of 0, or of at least 1; NaN of NaN and of infinity.
QSHARD_HOST_DEVICE float log_of(float x) {
  const uint32_t bits = float_bits(x);
  if (bits == 0) return bits_float(kInfBits | 0x80000000u);
  if (bits >= kInfBits) return bits_float(kNaNBits);
  int exponent = static_cast<int>(bits >> 23) - 127;
  double mantissa = static_cast<double>(bits_float((bits & kMantissaMask) | (127u << 23)));
  if (mantissa > 1.4142135623730951) {
    mantissa = detail::multiply(mantissa, 0.5);
    ++exponent;
  }
  // 2 artanh(z)
  const double z = (mantissa - 1.) / (mantissa + 1.);
  const double w = detail::multiply(z, z);
  double series = 1. / 15;
  series = fma(series, w, 1. / 13);
  series = fma(series, w, 1. / 11);
  series = fma(series, w, 1. / 9);
  series = fma(series, w, 1. / 7);
  series = fma(series, w, 1. / 5);
  series = fma(series, w, 1. / 3);
  series = fma(series, w, 1.);
  const double log = detail::multiply(2. * z, series);
  return static_cast<float>(fma(static_cast<double>(exponent), 0.6931471805599453, log));
}

/// What is known of some of a row's logits.
struct LogitSums {
  float max;     // at least kLowest
  float powers;  // sum of exp(logit - max)
  float logits;  // their own sum

  /// Missing logits of a chunk are -inf in `x`, and 0 in `present`, which is summed.
  QSHARD_HOST_DEVICE void add(const float (&x)[kSoftmaxChunk],
                              const float (&present)[kSoftmaxChunk], bool sums_logits) {
    float largest = max;
    for (int i = 0; i < kSoftmaxChunk; ++i) largest = larger(largest, x[i]);
    if (largest > max) {
      powers = detail::multiply(powers, exp_of(max - largest));
      max = largest;
    }
    float e[kSoftmaxChunk];
    for (int i = 0; i < kSoftmaxChunk; ++i) e[i] = exp_of(x[i] - max);
    powers += sum_of(e);
    if (sums_logits) logits += sum_of(present);
  }
  QSHARD_HOST_DEVICE static LogitSums merged(const LogitSums& a, const LogitSums& b) {
    LogitSums result;
    result.max = larger(a.max, b.max);
    result.powers = detail::multiply(a.powers, exp_of(a.max - result.max)) +
                    detail::multiply(b.powers, exp_of(b.max - result.max));
    result.logits = a.logits + b.logits;
    return result;
  }
  /// log(sum of exp(logit)); NaN if a logit is NaN or infinite, or all are -inf.
  QSHARD_HOST_DEVICE float log_sum() const { return canonical_nan(max + log_of(powers)); }

 private:
  QSHARD_HOST_DEVICE static float sum_of(const float (&x)[kSoftmaxChunk]) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
  }
};

constexpr LogitSums kNoLogits = {kLowest, 0.f, 0.f};

/// Label smoothing, as torch has it: the loss of a token is `keep` * (log_sum - logit of the
/// target) + `smoothing` * (log_sum - mean of the logits).
struct Smoothing {
  float smoothing = 0.f;
  float keep = 1.f;
  float of_other = 0.f;   // what a probability is less by in the gradient
  float of_target = 1.f;  // the target's

  QSHARD_HOST_DEVICE float loss(float log_sum, float target, float logits, float count) const {
    const float plain = log_sum - target;
    if (smoothing == 0.f) return canonical_nan(plain);
    const float mean = logits / count;
    return canonical_nan(fmaf(smoothing, log_sum - mean, detail::multiply(keep, plain)));
  }
  /// The gradient of the loss by one logit, before it is rounded.
  QSHARD_HOST_DEVICE float gradient(float logit, float log_sum, bool is_target) const {
    if (log_sum != log_sum) return bits_float(kNaNBits);
    return exp_of(logit - log_sum) - (is_target ? of_target : of_other);
  }
};

}  // namespace qshard
