// One row of delayed scaling's tables, step by step; shared by CPU and CUDA.
#pragma once

#include "kernels/numerics/float8.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard {

QSHARD_HOST_DEVICE bool is_finite_amax(float amax) {
  return (float_bits(amax) & kAbsMask) < kInfBits;
}

/// What scales are made of: amax * 2^margin, at most FLT_MAX; 0 for an amax that gives no scale.
QSHARD_HOST_DEVICE float with_margin(float amax, int margin) {
  if (!(amax > 0.f) || !is_finite_amax(amax)) return 0.f;
  const float product = amax * bits_float(static_cast<uint32_t>(127 + margin) << 23);
  return is_finite_amax(product) ? product : bits_float(kInfBits - 1);
}

/// The amax of values that are the codes of values of amax `amax`, read back as `dtype`: rounding
/// is monotonic, so it is the code of the largest that is read.
QSHARD_HOST_DEVICE float amax_read_back(float amax, float scaling_amax, float code_max,
                                        bool power_of_two, DType dtype) {
  const float scale = scale_from_amax(scaling_amax, code_max, power_of_two);
  const float value = decode_e4m3(encode_e4m3(amax * scale)) * inverse_scale(scale);
  if (dtype == DType::kBFloat16) return bfloat16_to_float(float_to_bfloat16(value));
  if (dtype == DType::kFloat16) return half_to_float(float_to_half(value));
  return value;
}

/// The amax to scale a weight's codes by, after a flush that is no step. `scaling` is its row.
QSHARD_HOST_DEVICE float refresh_weight(float amax, float* scaling, float code_max,
                                        bool power_of_two, int margin, DType dtype) {
  const float in_use = scaling[kInUse];
  const float known = scaling[kOfData];
  const bool is_known =
      in_use > 0.f && (float_bits(amax) == float_bits(known) ||
                       amax == amax_read_back(known, in_use, code_max, power_of_two, dtype));
  if (is_known) return in_use;
  scaling[kOfData] = amax;
  return scaling[kInUse] = with_margin(amax, margin);
}

/// The amax to scale a weight's codes by after a step. `largest` is that of the history with this
/// step's amax in it, or this step's alone, as the format says.
QSHARD_HOST_DEVICE float step_weight(float amax, float largest, float* scaling, int margin) {
  float previous = scaling[kNext] > 0.f ? scaling[kNext] : scaling[kInUse];
  if (!(previous > 0.f)) previous = with_margin(amax, margin);
  const float next = is_finite_amax(amax) ? with_margin(largest, margin) : 0.f;
  scaling[kInUse] = previous;
  scaling[kNext] = next > 0.f ? next : previous;
  scaling[kOfData] = amax;
  return previous;
}

/// The same for an activation: there are no codes of it to keep.
QSHARD_HOST_DEVICE void step_activation(float largest, float* scaling, int margin) {
  const float next = with_margin(largest, margin);
  if (next > 0.f) scaling[kInUse] = scaling[kNext] = next;
}

/// kernels/scaling/scaling_state.h: delay_amax.
QSHARD_HOST_DEVICE float delayed_amax(float amax, float* history, const float* scaling,
                                      int margin) {
  if (is_finite_amax(amax) && amax > history[0]) history[0] = amax;
  return scaling[kInUse] > 0.f ? scaling[kInUse] : with_margin(amax, margin);
}

}  // namespace qshard
