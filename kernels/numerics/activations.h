// Activations of MLPs and their derivatives in fp32, with the same bits on the CPU and on GPUs: the
// exponential is written out, and each step is rounded to nearest. Rounded to bfloat16 they are
// within one ulp of the formula, which few of all bfloat16 are off at all
// (test/cpp/numerics/test_activations.cpp).
#pragma once

#include "kernels/numerics/rounded.h"

namespace qshard {

/// silu: x sigmoid(x). gelu: that of tanh, which is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
enum class Activation : uint8_t { kSilu, kGelu, kRelu, kSquaredRelu };

/// 1 over a divisor of 1 or more, to nearest.
struct NearestReciprocal {
  QSHARD_HOST_DEVICE float operator()(float divisor) const {
#ifdef __CUDA_ARCH__
    return __frcp_rn(divisor);
#else
    return 1.f / divisor;
#endif
  }
};

namespace detail {

QSHARD_HOST_DEVICE float smaller(float a, float b) {
#ifdef __CUDA_ARCH__
  return fminf(a, b);
#else
  return std::fmin(a, b);
#endif
}

/// 1 + 2^t, of a power within 2^-22, which is infinite from t = 128 on. NaN gives some number.
QSHARD_HOST_DEVICE float one_and_power(float t) {
  t = -smaller(-smaller(t, 128.f), 125.f);
  constexpr float kRounds = 12582912.f;  // to integers, which the low bits of the sum then hold
  const float shifted = add(t, kRounds);
  const float r = add(t, -add(shifted, -kRounds));  // within [-1/2, 1/2]
  float power = 0.00132647273f;
  power = multiply_add(power, r, 0.00967151299f);
  power = multiply_add(power, r, 0.0555073358f);
  power = multiply_add(power, r, 0.240222424f);
  power = multiply_add(power, r, 0.693147004f);
  power = multiply_add(power, r, 1.f);
  const float half_scale = bits_float((float_bits(shifted) << 23) + (126u << 23));
  return multiply_add(multiply(power, half_scale), 2.f, 1.f);
}

}  // namespace detail

/// x sigmoid(z), z = x (linear + cubic x^2).
struct SigmoidGate {
  float linear;
  float cubic;
  /// A magnitude of x up to which 1 + exp(-z) is at most 2^126.
  float ordinary;
  /// No derivative is larger, even where it is computed.
  float steepest;

  /// `reciprocal`: NearestReciprocal, or another with its bits.
  template <typename Reciprocal = NearestReciprocal>
  QSHARD_HOST_DEVICE float sigmoid(float x, const Reciprocal& reciprocal = {}) const {
    constexpr float kLog2OfE = 1.44269504f;
    const float factor = detail::multiply_add(square(x), -kLog2OfE * cubic, -kLog2OfE * linear);
    return reciprocal(detail::one_and_power(detail::multiply(x, factor)));
  }
  /// `sigmoid`: of x.
  QSHARD_HOST_DEVICE float value(float x, float sigmoid) const {
    return detail::multiply(x, sigmoid);
  }
  QSHARD_HOST_DEVICE float derivative(float x, float sigmoid) const {
    const float slope = detail::multiply_add(square(x), 3.f * cubic, linear);
    const float rest = detail::multiply(value(x, sigmoid), detail::add(1.f, -sigmoid));
    return detail::multiply_add(rest, slope, sigmoid);
  }

 private:
  /// An infinite one would make NaN of a finite x.
  QSHARD_HOST_DEVICE static float square(float x) {
    return detail::smaller(detail::multiply(x, x), 1e30f);
  }
};

/// The gate of kSilu or kGelu.
QSHARD_HOST_DEVICE SigmoidGate sigmoid_gate(Activation activation) {
  return activation == Activation::kGelu ? SigmoidGate{1.59576912f, 0.0713548163f, 9.5f, 1.13f}
                                         : SigmoidGate{1.f, 0.f, 87.f, 1.1f};
}

/// max(x, 0) or its square. A NaN stays one.
struct ReluGate {
  bool squared;

  QSHARD_HOST_DEVICE float value(float x) const {
    const float positive = x <= 0.f ? 0.f : x;
    return squared ? detail::multiply(positive, positive) : positive;
  }
  /// The derivative times `grad`, and 0 where x is not above 0, whatever `grad` is.
  QSHARD_HOST_DEVICE float gradient(float grad, float x) const {
    if (x <= 0.f) return 0.f;
    return squared ? detail::multiply(grad, detail::multiply(2.f, x)) : grad;
  }
};

}  // namespace qshard
