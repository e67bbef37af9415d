// Stochastic rounding of messages of gradients (kernels/numerics/message_noise.h): the forms
// without branches against its definition, and its mean.
#include <gtest/gtest.h>

#include <random>

#include "kernels/messages/gradient_message.h"
#include "kernels/numerics/message_noise.h"
#include "kernels/numerics/nvfp4_message.h"

namespace qshard::testing {
namespace {

constexpr float kScales[] = {1.f, 0.37f, 1.3333334f, 5.9604645e-8f, 41.7f, 3.1e11f};

// |x| * scale < largest: all bfloat16, and what lies around every code.
template <typename Run>
void for_each_value(float scale, float largest, const Run& run) {
  const auto try_one = [&](float x) {
    if (x * scale < largest) run(x);
  };
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    try_one(bfloat16_to_float(static_cast<uint16_t>(bits)));
  }
  for (uint32_t byte = 1; byte < 0x7f; ++byte) {
    const uint32_t turn = float_bits(decode_e4m3(static_cast<uint8_t>(byte)) / scale);
    for (uint32_t bits = turn - 9; bits < turn + 9; ++bits) try_one(bits_float(bits));
  }
  for (uint32_t bits = 1; bits < kInfBits; bits += 100003) try_one(bits_float(bits));
}

TEST(MessageNoise, ValuesOfAWordShareItsBytes) {
  const uint32_t want[] = {0x112233, 0x223344, 0x334411, 0x441122};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(noise_of_word(0x44332211, i), want[i]);
}

TEST(MessageNoise, ProductsAreRoundedUp) {
  EXPECT_EQ(product_up(-3.f, 0.5f), 1.5f);
  EXPECT_EQ(product_up(1.f + 0x1p-23f, 1.f + 0x1p-23f), 1.f + 0x1p-22f + 0x1p-23f);
  EXPECT_EQ(product_up(0x1p-149f, 0x1p-20f), 0x1p-149f);
  EXPECT_EQ(product_up(0.f, 3.f), 0.f);
  EXPECT_EQ(product_up(3e38f, 2.f), HUGE_VALF);
}

TEST(MessageNoise, CodesWithoutBranchesAreTheDefinitions) {
  std::mt19937 random(1);
  for (const float scale : kScales) {
    const float moved_e4m3 = scale * kE4M3AsFloat;
    const float moved_e2m1 = scale * (kE2M1AsFloat / kMovedValue);
    for_each_value(scale, 448.f, [&](float x) {
      for (const uint32_t noise :
           {0u, 0xfffffeu, 0xffffffu, static_cast<uint32_t>(random()) >> 8}) {
        if (scale >= 0x1p-6f) {
          ASSERT_EQ(high_e4m3_with_noise(product_up(x, moved_e4m3), noise) >> 24,
                    encode_e4m3_with_noise(x, scale, noise))
              << x << " times " << scale << ", noise " << noise;
        }
        if (x * scale >= 7.f) continue;
        const float product = product_up(product_up(x, kMovedValue), moved_e2m1);
        ASSERT_EQ(std::min(high_e2m1_with_noise(product, noise) >> 24, 7u),
                  encode_e2m1_with_noise(x, scale, noise))
            << x << " times " << scale << ", noise " << noise;
      }
    });
  }
}

TEST(MessageNoise, SignsAreKeptAndNaNIsAllOnes) {
  EXPECT_EQ(encode_e4m3_with_noise(-0.f, 1.f, 0xffffff), 0x80u);
  EXPECT_EQ(encode_e2m1_with_noise(-6.9f, 1.f, 0xffffff), 0xfu);
  EXPECT_EQ(encode_e4m3_with_noise(-500.f, 1.f, 0), 0xfeu);
  EXPECT_EQ(encode_e4m3_with_noise(-std::nanf(""), 1.f, 0), 0xffu);
  EXPECT_EQ(encode_e2m1_with_noise(std::nanf(""), 1.f, 0), 0x7u);
}

// How much of all noise makes a value go up: its distance, rounded up to what noise has bits for.
TEST(MessageNoise, MeansAreTheValues) {
  const auto share_up = [](float x, uint32_t (*encode)(float, float, uint32_t)) {
    const uint32_t lower = encode(x, 1.f, 0);
    uint32_t below = 0, above = 1u << 24;  // noise from `above` on goes up
    while (below + 1 < above) {
      const uint32_t noise = (below + above) / 2;
      (encode(x, 1.f, noise) == lower ? below : above) = noise;
    }
    return 1.0 - above * 0x1p-24;
  };
  for (const float x : {0.f, 1e-9f, 0.1f, 0.3f, 0.49f, 0.7f, 1.f, 1.1f, 1.75f}) {
    const double in_e2m1 = 2. * x - std::floor(2. * x);
    EXPECT_EQ(share_up(x, encode_e2m1_with_noise), std::ceil(std::ldexp(in_e2m1, 22)) * 0x1p-22);
    const double steps = std::ldexp(static_cast<double>(x), x < 0x1p-6 ? 9 : 3 - std::ilogb(x));
    const double in_e4m3 = steps - std::floor(steps);
    EXPECT_EQ(share_up(x, encode_e4m3_with_noise), std::ceil(std::ldexp(in_e4m3, 20)) * 0x1p-20);
  }
}

TEST(MessageNoise, MovableTilesAreOrdinary) {
  for (const float amax : {0x1p-50f, 1.f, std::nextafter(0x1p34f, 0.f)}) {
    EXPECT_TRUE(is_movable_tile(float_bits(amax)) && is_ordinary_tile(float_bits(amax))) << amax;
    // The smallest and the largest scale of a block in it.
    const float scale = ordinary_tile_scales(float_bits(amax)).scale;
    for (const float of_block : {448.f, 0x1p-9f}) {
      const float moved = scale / of_block * (kE2M1AsFloat / kMovedValue);
      EXPECT_TRUE(std::isnormal(moved)) << amax << " " << of_block;
    }
  }
  for (const float amax : {0.f, std::nextafter(0x1p-50f, 0.f), 0x1p34f, HUGE_VALF}) {
    EXPECT_FALSE(is_movable_tile(float_bits(amax))) << amax;
  }
}

}  // namespace
}  // namespace qshard::testing
