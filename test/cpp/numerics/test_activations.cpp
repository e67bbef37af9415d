// Activations of MLPs against their formulas in double, for every bfloat16.
#include "kernels/numerics/activations.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace qshard {
namespace {

struct Formula {
  Activation activation;
  double linear, cubic;  // x sigmoid(x (linear + cubic x^2))

  double sigmoid(double x) const { return 1 / (1 + std::exp(-x * (linear + cubic * x * x))); }
  double value(double x) const { return x * sigmoid(x); }
  double derivative(double x) const {
    const double rest = sigmoid(-x);  // 1 - sigmoid(x), which keeps its bits
    return sigmoid(x) + (rest > 0 ? x * sigmoid(x) * rest * (linear + 3 * cubic * x * x) : 0.);
  }
};

const double kGeluLinear = 2 * std::sqrt(2 / std::acos(-1.));
const Formula kFormulas[] = {{Activation::kSilu, 1, 0},
                             {Activation::kGelu, kGeluLinear, kGeluLinear * 0.044715}};

/// The bfloat16 nearest to x; between two of them, the even one.
uint16_t nearest(double x) {
  const double magnitude = std::fabs(x);
  const auto value = [](int code) {
    return code == 0x7f80 ? std::ldexp(1., 128) : double{bits_float(uint32_t(code) << 16)};
  };
  int code = static_cast<int>(float_bits(static_cast<float>(magnitude)) >> 16);
  if (code > 0 && value(code) > magnitude) --code;
  const double middle = (value(code) + value(code + 1)) / 2;
  if (magnitude > middle || (magnitude == middle && code % 2 == 1)) ++code;
  return static_cast<uint16_t>(code | (std::signbit(x) ? 0x8000 : 0));
}

/// Where among all finite bfloat16 a code is.
int rank_of(uint16_t code) { return code & 0x8000 ? -(code & 0x7fff) : code; }

/// At most `most_off` of all finite bfloat16 may be off, by one ulp.
template <typename Got, typename Exact>
void expect_nearest(const Got& got, const Exact& exact, int most_off) {
  int off = 0;
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float x = bits_float(code << 16);
    if (!std::isfinite(x)) continue;
    const int rank = rank_of(float_to_bfloat16(got(x)));
    const int expected = rank_of(nearest(exact(x)));
    if (rank == expected) continue;
    // From 2^128 on 1 + exp(-z) is infinite: what is below 2^-120 is 0.
    if (rank == 0 && std::fabs(exact(x)) < std::ldexp(1., -120)) continue;
    EXPECT_LE(std::abs(rank - expected), 1) << x;
    ++off;
  }
  EXPECT_LE(off, most_off);
}

TEST(Activations, AreTheNearestOfEveryBFloat16) {
  for (const Formula& formula : kFormulas) {
    const SigmoidGate gate = sigmoid_gate(formula.activation);
    expect_nearest([&](float x) { return gate.value(x, gate.sigmoid(x)); },
                   [&](float x) { return formula.value(x); }, 0);
    expect_nearest([&](float x) { return gate.derivative(x, gate.sigmoid(x)); },
                   [&](float x) { return formula.derivative(x); }, 1);
  }
}

TEST(Activations, AreCloseInFp32) {
  for (const Formula& formula : kFormulas) {
    const SigmoidGate gate = sigmoid_gate(formula.activation);
    for (float x = -8; x < 12; x += 1e-4f) {
      const float sigmoid = gate.sigmoid(x);
      ASSERT_LE(std::fabs(gate.value(x, sigmoid) - formula.value(x)),
                1e-5 * std::fabs(formula.value(x)))
          << x;
      const float derivative = gate.derivative(x, sigmoid);
      ASSERT_LE(std::fabs(derivative - formula.derivative(x)), 4e-6) << x;
      ASSERT_LE(std::fabs(derivative), gate.steepest) << x;
    }
  }
}

TEST(Activations, OrdinaryDivisorsAreWithinTheShortDivisionsRange) {
  for (const Activation activation : {Activation::kSilu, Activation::kGelu}) {
    const SigmoidGate gate = sigmoid_gate(activation);
    for (const float x : {gate.ordinary, -gate.ordinary}) {
      float divisor = 0;
      gate.sigmoid(x, [&](float of) { return divisor = of; });
      EXPECT_GE(divisor, 1.f);
      EXPECT_LE(divisor, std::ldexp(1.f, 126));
    }
  }
}

TEST(Activations, OfInfinitiesAreTorchs) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float nan = std::nanf("");
  for (const Activation activation : {Activation::kSilu, Activation::kGelu}) {
    const SigmoidGate gate = sigmoid_gate(activation);
    EXPECT_EQ(gate.value(kInf, gate.sigmoid(kInf)), kInf);
    for (const float x : {-kInf, nan}) EXPECT_TRUE(std::isnan(gate.value(x, gate.sigmoid(x))));
    for (const float x : {kInf, -kInf, nan}) {
      EXPECT_TRUE(std::isnan(gate.derivative(x, gate.sigmoid(x))));
    }
  }
  for (const bool squared : {false, true}) {
    const ReluGate gate{squared};
    EXPECT_EQ(gate.value(kInf), kInf);
    EXPECT_EQ(gate.value(-kInf), 0.f);
    EXPECT_EQ(gate.value(-3.f), 0.f);
    EXPECT_EQ(gate.value(3.f), squared ? 9.f : 3.f);
    EXPECT_EQ(gate.gradient(0.5f, 3.f), squared ? 3.f : 0.5f);
    for (const float x : {0.f, -0.f, -3.f}) EXPECT_EQ(gate.gradient(kInf, x), 0.f);
    EXPECT_TRUE(std::isnan(gate.value(nan)));
    EXPECT_EQ(std::isnan(gate.gradient(1.f, nan)), squared);
  }
}

}  // namespace
}  // namespace qshard
