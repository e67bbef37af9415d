// Arithmetic of NVFP4's messages (kernels/numerics/nvfp4_message.h): bit for bit that of
// row_scales.h.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/messages/gradient_message.h"
#include "kernels/numerics/nvfp4_message.h"

namespace qshard::testing {
namespace {

// In one binade, as fp32's rounding does not depend on the exponent, and at each end.
std::vector<uint32_t> ordinary_amaxes(uint32_t step) {
  std::vector<uint32_t> found;
  for (const uint32_t exponent : {127u - 60, 127u, 127u + 59}) {
    for (uint32_t m = 0; m <= kMantissaMask; m += step) found.push_back(exponent << 23 | m);
    found.push_back(exponent << 23 | kMantissaMask);
  }
  return found;
}

TEST(Nvfp4Message, TileScalesAreTheDivisions) {
  const auto check = [](uint32_t amax) {
    ASSERT_TRUE(is_ordinary_tile(amax));
    const Nvfp4TileScales of = ordinary_tile_scales(amax);
    const float scale_inv = nvfp4_tensor_scale_inv(bits_float(amax));
    ASSERT_EQ(of.scale_inv, scale_inv) << amax;
    ASSERT_EQ(of.scale, nvfp4_tensor_scale(scale_inv)) << amax;
    ASSERT_EQ(of.amax_factor, nvfp4_amax_factor(of.scale)) << amax;
  };
  for (uint32_t mantissa = 0; mantissa <= kMantissaMask; ++mantissa) check(127u << 23 | mantissa);
  for (const uint32_t amax : ordinary_amaxes(61)) check(amax);
}

TEST(Nvfp4Message, OrdinaryTilesEnd) {
  for (const float amax :
       {0.f, 1e-45f, std::nextafter(0x1p-60f, 0.f), 0x1p60f, 3e38f, INFINITY, std::nanf("")}) {
    EXPECT_FALSE(is_ordinary_tile(float_bits(amax))) << amax;
  }
}

// From an inverse as far off as a GPU's may be: every divisor that has so few bits.
TEST(Nvfp4Message, QuotientsByFewBitsAreRoundedToNearest) {
  for (const float off : {1.f, 1.f + 0x1p-22f, 1.f - 0x1p-22f}) {
    for (uint32_t byte = 1; byte < kE4M3NaN; ++byte) {
      const float divisor = decode_e4m3(static_cast<uint8_t>(byte));
      for (const uint32_t bits : ordinary_amaxes(40961)) {
        const float a = bits_float(bits);
        ASSERT_EQ(divide_by_few_bits(a, divisor, 1 / divisor * off), a / divisor) << a << divisor;
      }
    }
    for (const float divisor : {kE2M1Max, kE2M1Max * kE4M3Max}) {
      for (const uint32_t bits : ordinary_amaxes(37)) {
        const float a = bits_float(bits);
        ASSERT_EQ(divide_by_few_bits(a, divisor, 1 / divisor * off), a / divisor) << a << divisor;
      }
    }
  }
}

// Magnitudes below 7: all bfloat16 times some scales, and what lies around every turn.
template <typename Run>
void for_each_magnitude(const Run& run) {
  for (const float scale : {1.f, 0.37f, 1.3333334f, 5.9604645e-8f, 41.7f, 3.1e20f}) {
    for (uint32_t bits = 0; bits < 0x8000; ++bits) {
      const float x = bfloat16_to_float(static_cast<uint16_t>(bits)) * scale;
      if (x < 7.f) run(x);
    }
  }
  for (int quarter = 0; quarter < 28; ++quarter) {
    const uint32_t turn = float_bits(0.25f * static_cast<float>(quarter));
    for (uint32_t bits = turn < 9 ? 0 : turn - 9; bits < turn + 9; ++bits) {
      if (bits_float(bits) < 7.f) run(bits_float(bits));
    }
  }
  for (uint32_t bits = 0; bits < float_bits(7.f); bits += 1021) run(bits_float(bits));
}

TEST(Nvfp4Message, CodesAreThoseOfNearest) {
  for_each_magnitude([](float x) { ASSERT_EQ(biased_e2m1(x) - kE2M1Bias, encode_e2m1(x)) << x; });
}

TEST(Nvfp4Message, CodesAreE4M3OfTheirValues) {
  for (uint32_t codes = 0; codes < 0x10000; ++codes) {
    const uint32_t word = codes * 0x10001u;
    const uint32_t even = e2m1_as_e4m3<0>(word), odd = e2m1_as_e4m3<1>(word);
    for (int i = 0; i < 4; ++i) {
      const auto value = [&](int nibble) {
        return float_bits(decode_e2m1(static_cast<uint8_t>(word >> (4 * nibble) & 0xf)) * 0x1p-6f);
      };
      ASSERT_EQ(float_bits(decode_e4m3(static_cast<uint8_t>(even >> (8 * i)))), value(2 * i));
      ASSERT_EQ(float_bits(decode_e4m3(static_cast<uint8_t>(odd >> (8 * i)))), value(2 * i + 1));
    }
  }
}

TEST(Nvfp4Message, ProductsOfOrdinaryTilesAreExact) {
  for (const uint32_t amax : ordinary_amaxes(997)) {
    const float scale_inv = ordinary_tile_scales(amax).scale_inv;
    ASSERT_TRUE(has_exact_products(scale_inv));
    for (uint32_t byte = 0; byte < kE4M3NaN; ++byte) {
      const auto scale = static_cast<double>(decode_e4m3(static_cast<uint8_t>(byte))) * scale_inv;
      ASSERT_EQ(nvfp4_decode_scale(static_cast<uint8_t>(byte), scale_inv), scale);
      ASSERT_EQ(static_cast<float>(3 * scale), 3 * scale);  // others are its powers of two
    }
  }
  for (const float scale_inv :
       {bits_float(0x3f800080u), 0.f, 1e-40f, 3e38f, INFINITY, std::nanf("")}) {
    EXPECT_FALSE(has_exact_products(scale_inv)) << scale_inv;
  }
}

}  // namespace
}  // namespace qshard::testing
