// Row-local scales and FP4 codes from their formulas: searches, tables, double precision.
#pragma once

#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/format/formats.h"

namespace qshard::testing {

constexpr float kE2M1Values[] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};

/// The nearest of the eight values; of two as near the one with the even code.
inline uint8_t reference_e2m1(float x) {
  const uint8_t sign = std::signbit(x) ? 8 : 0;
  if (std::isnan(x)) return sign | 7;
  const double abs = std::min(std::fabs(x), 6.f);
  int best = 0;
  for (int code = 1; code < 8; ++code) {
    const double distance = std::fabs(abs - kE2M1Values[code]);
    const double best_distance = std::fabs(abs - kE2M1Values[best]);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(sign | best);
}

inline float reference_e4m3(uint8_t code) { return {c10::Float8_e4m3fn(code, {})}; }

/// What a block's byte stands for, and what its values and codes are multiplied by.
struct ReferenceScale {
  uint8_t byte;
  float encode;
  float decode;
};

inline float to_finite_float(double x) {
  return std::min(static_cast<float>(x), std::numeric_limits<float>::max());
}

inline ReferenceScale reference_mxfp8_scale(float amax) {
  if (std::isnan(amax)) return {0xff, 1.f, amax};
  int e = 0;
  while (e < 254 && std::ldexp(448., e - 127) < amax) ++e;
  return {static_cast<uint8_t>(e), std::ldexp(1.f, 127 - e), std::ldexp(1.f, e - 127)};
}

/// amax / 2688 with 16 significant bits, fewer where fp32 has fewer.
inline float reference_tensor_scale_inv(float amax) {
  if (!(amax > 0.f) || std::isinf(amax)) return 1.f;
  const float quotient = static_cast<float>(static_cast<double>(amax) / 2688.);
  int exponent;
  std::frexp(quotient, &exponent);
  const double ulp = std::ldexp(1., std::max(exponent, -125) - 16);
  const auto rounded = static_cast<float>(std::nearbyint(quotient / ulp) * ulp);
  return rounded > 0.f ? rounded : 1.f;
}

inline ReferenceScale reference_nvfp4_scale(float amax, float tensor_scale_inv) {
  if (std::isnan(amax)) return {0x7f, 1.f, amax};
  const float tensor_scale = to_finite_float(1. / tensor_scale_inv);
  const auto amax_factor = static_cast<float>(tensor_scale / 6.);
  const auto wanted = static_cast<float>(static_cast<double>(amax) * amax_factor);
  const c10::Float8_e4m3fn scale(std::min(wanted, 448.f));
  const float value = scale;
  return {scale.x, value > 0.f ? to_finite_float(static_cast<double>(tensor_scale) / value) : 0.f,
          static_cast<float>(static_cast<double>(value) * tensor_scale_inv)};
}

inline ReferenceScale reference_block_scale(const Format& format, float amax,
                                            float tensor_scale_inv) {
  return format.scale.dtype == DType::kFloat8E8M0 ? reference_mxfp8_scale(amax)
                                                  : reference_nvfp4_scale(amax, tensor_scale_inv);
}

}  // namespace qshard::testing
