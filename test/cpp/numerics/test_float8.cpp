// Scalar numerics against torch's own types, and the AVX2 loops against the portable ones.
#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/row_kernels.h"
#include "kernels/numerics/float8.h"

namespace qshard {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A spread of all floats, and every code's value, the ties between codes, and their neighbours.
std::vector<float> interesting_floats() {
  std::vector<float> out;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 65521) {
    out.push_back(bits_float(static_cast<uint32_t>(bits)));
  }
  for (int code = 0; code < 0x7f; ++code) {
    const float here = decode_e4m3(static_cast<uint8_t>(code));
    const float next = code == 0x7e ? 480.f : decode_e4m3(static_cast<uint8_t>(code + 1));
    for (const float x : {here, (here + next) / 2}) {
      for (const float y : {x, std::nextafter(x, kInf), std::nextafter(x, -kInf)}) {
        out.push_back(y);
        out.push_back(-y);
      }
    }
  }
  for (const float x : {kInf, -kInf, std::nanf(""), -std::nanf(""), bits_float(0x7f800001u),
                        std::numeric_limits<float>::denorm_min()}) {
    out.push_back(x);
  }
  return out;
}

TEST(Float8, EncodesAsTorch) {
  for (const float x : interesting_floats()) {
    if (std::isnan(x)) {
      EXPECT_EQ(encode_e4m3(x) & 0x7f, 0x7f);
      EXPECT_EQ(encode_e4m3(x) >> 7, std::signbit(x) ? 1 : 0);
      continue;
    }
    const float e4m3 = std::min(448.f, std::max(-448.f, x));
    const float e5m2 = std::min(57344.f, std::max(-57344.f, x));
    ASSERT_EQ(encode_e4m3(x), c10::Float8_e4m3fn(e4m3).x) << x;
    ASSERT_EQ(encode_e5m2(x), c10::Float8_e5m2(e5m2).x) << x;
  }
}

TEST(Float8, DecodesEveryCodeAsTorch) {
  for (int code = 0; code < 256; ++code) {
    const float x = decode_e4m3(static_cast<uint8_t>(code));
    const float torch =
        c10::Float8_e4m3fn(static_cast<uint8_t>(code), c10::Float8_e4m3fn::from_bits());
    if (std::isnan(torch)) {
      EXPECT_TRUE(std::isnan(x));
    } else {
      EXPECT_EQ(float_bits(x), float_bits(torch)) << code;
    }
    EXPECT_EQ(encode_e4m3(x), code);
  }
}

TEST(Float8, SixteenBitTypesConvertAsTorch) {
  for (const float x : interesting_floats()) {
    if (std::isnan(x)) continue;
    ASSERT_EQ(float_to_half(x), c10::Half(x).x) << x;
    ASSERT_EQ(float_to_bfloat16(x), c10::BFloat16(x).x) << x;
  }
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float torch = c10::Half(half, c10::Half::from_bits());
    if (std::isnan(torch)) {
      EXPECT_TRUE(std::isnan(half_to_float(half)));
    } else {
      EXPECT_EQ(float_bits(half_to_float(half)), float_bits(torch));
    }
  }
}

struct ScaleCase {
  float amax, scale, power_of_two_scale;
};

TEST(Float8, Scale) {
  const float max = std::numeric_limits<float>::max();
  const float above = std::nextafter(448.f, kInf);
  const float below = std::nextafter(448.f, 0.f);
  const ScaleCase cases[] = {
      {0.f, 1.f, 1.f},
      {kInf, 1.f, 1.f},
      {std::nanf(""), 1.f, 1.f},
      {448.f, 1.f, 1.f},
      {above, 448.f / above, 0.5f},
      {below, 448.f / below, 1.f},
      {1.f, 448.f, 256.f},
      {std::nextafter(3.5f, 4.f), 448.f / std::nextafter(3.5f, 4.f), 64.f},
      {3.5f, 128.f, 128.f},
      {std::numeric_limits<float>::denorm_min(), max, 0x1p127f},
      {max, 448.f / max, 0x1p-120f},
  };
  for (const ScaleCase& c : cases) {
    EXPECT_EQ(scale_from_amax(c.amax, kE4M3Max, false), c.scale) << c.amax;
    EXPECT_EQ(scale_from_amax(c.amax, kE4M3Max, true), c.power_of_two_scale) << c.amax;
  }
  EXPECT_EQ(inverse_scale(0x1p127f), 0x1p-127f);  // subnormal
}

// Against the division, for every mantissa at the exponents where something happens.
TEST(Float8, PowerOfTwoScaleIsTheQuotientWithItsMantissaCleared) {
  for (const float code_max : {kE4M3Max, kE5M2Max}) {
    for (const uint32_t exponent : {0u, 1u, 7u, 8u, 14u, 15u, 127u, 254u}) {
      for (uint32_t mantissa = 0; mantissa < (1u << 23); mantissa += exponent == 127 ? 1 : 61) {
        const float amax = bits_float((exponent << 23) | mantissa);
        if (amax == 0.f) continue;
        const float scale = scale_from_amax(amax, code_max, false);
        const float expected = bits_float(float_bits(scale) & kInfBits);
        ASSERT_EQ(scale_from_amax(amax, code_max, true), expected) << amax;
        ASSERT_EQ(inverse_scale(expected), 1.f / expected) << amax;
      }
    }
  }
}

TEST(Float8, LargestOfSameScale) {
  for (const float code_max : {kE4M3Max, kE5M2Max}) {
    for (const uint32_t exponent : {1u, 7u, 8u, 14u, 15u, 127u, 253u, 254u}) {
      for (uint32_t mantissa = 0; mantissa < (1u << 23); mantissa += 61) {
        const float amax = bits_float((exponent << 23) | mantissa);
        const float largest = largest_of_same_scale(amax, code_max, true);
        const float above = std::nextafter(largest, kInf);
        const float scale = scale_from_amax(amax, code_max, true);
        ASSERT_GE(largest, amax);
        ASSERT_EQ(scale_from_amax(largest, code_max, true), scale) << amax;
        // The smallest ones share the largest scale that there is.
        if (scale < 0x1p127f) {
          ASSERT_NE(scale_from_amax(above, code_max, true), scale) << amax;
        }
        ASSERT_EQ(largest_of_same_scale(amax, code_max, false), amax);
      }
    }
    for (const float amax : {0.f, kInf, std::numeric_limits<float>::denorm_min()}) {
      EXPECT_EQ(largest_of_same_scale(amax, code_max, true), amax);
    }
    EXPECT_TRUE(std::isnan(largest_of_same_scale(std::nanf(""), code_max, true)));
  }
}

// Values of one type, as raw storage.
std::vector<std::vector<uint8_t>> storages() {
  std::vector<std::vector<uint8_t>> out(3);
  const std::vector<float> floats = interesting_floats();
  out[0].resize(floats.size() * 4);
  std::memcpy(out[0].data(), floats.data(), out[0].size());
  for (int type = 1; type < 3; ++type) {
    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    out[type].resize(all.size() * 2);
    std::memcpy(out[type].data(), all.data(), out[type].size());
  }
  return out;
}

TEST(RowKernels, Avx2EqualsPortable) {
  const cpu::RowKernels* avx2 = cpu::avx2_row_kernels();
  if (avx2 == nullptr) GTEST_SKIP() << "this CPU has no AVX2";
  const cpu::RowKernels& portable = cpu::portable_row_kernels();
  const std::vector<std::vector<uint8_t>> values = storages();
  for (int type = 0; type < 3; ++type) {
    const int64_t size = type == 0 ? 4 : 2;
    const auto all = static_cast<int64_t>(values[type].size()) / size;
    for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{33}, int64_t{127}, all}) {
      const uint8_t* x = values[type].data() + (all - n) * size;
      EXPECT_EQ(avx2->amax[type](x, n), portable.amax[type](x, n));
      std::vector<uint32_t> a(n, 0x3f800000u), b(a);
      avx2->fold_amax[type](x, n, a.data());
      portable.fold_amax[type](x, n, b.data());
      ASSERT_EQ(a, b) << "type " << type;
      for (const float scale : {1.f, 0.37f, 0x1p-119f, 0x1p127f}) {
        std::vector<uint8_t> a(n), b(n);
        avx2->encode[type](x, n, scale, a.data());
        portable.encode[type](x, n, scale, b.data());
        ASSERT_EQ(a, b) << "type " << type << " scale " << scale;
      }
    }
    std::vector<uint8_t> codes(256 + 13);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
    const auto n = static_cast<int64_t>(codes.size());
    for (const float scale_inv :
         {1.f, 0.37f, 0x1p-127f, 0x1p120f, 3e38f, kInf, bits_float(0x7fffffffu)}) {
      std::vector<uint8_t> a(n * size), b(n * size);
      avx2->decode[type](codes.data(), n, scale_inv, a.data());
      portable.decode[type](codes.data(), n, scale_inv, b.data());
      ASSERT_EQ(a, b) << "type " << type << " scale_inv " << scale_inv;
    }
  }
}

TEST(RowKernels, Avx2EqualsPortableInFp4) {
  const cpu::RowKernels* avx2 = cpu::avx2_row_kernels();
  if (avx2 == nullptr) GTEST_SKIP() << "this CPU has no AVX2";
  const cpu::RowKernels& portable = cpu::portable_row_kernels();
  const std::vector<std::vector<uint8_t>> values = storages();
  std::vector<uint8_t> codes(300);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  for (int type = 0; type < 3; ++type) {
    const int64_t size = type == 0 ? 4 : 2;
    const auto all = static_cast<int64_t>(values[type].size()) / size;
    for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{16}, int64_t{33}, all}) {
      const uint8_t* x = values[type].data() + (all - n) * size;
      for (const float scale : {0.f, 1.f, 0.37f, 0x1p-30f, 0x1p127f}) {
        std::vector<uint8_t> a((n + 1) / 2, 0xff), b(a);
        avx2->encode_fp4[type](x, n, scale, a.data());
        portable.encode_fp4[type](x, n, scale, b.data());
        ASSERT_EQ(a, b) << "type " << type << " scale " << scale;
        ASSERT_TRUE(n % 2 == 0 || a.back() >> 4 == 0);
      }
    }
    for (const int64_t n : {0, 1, 15, 16, 33, 599}) {
      for (const float scale_inv : {1.f, 0.37f, 0x1p-140f, 0x1p120f, 3e38f}) {
        std::vector<uint8_t> a(n * size), b(n * size);
        avx2->decode_fp4[type](codes.data(), n, scale_inv, a.data());
        portable.decode_fp4[type](codes.data(), n, scale_inv, b.data());
        ASSERT_EQ(a, b) << "type " << type << " scale_inv " << scale_inv;
      }
    }
  }
}

}  // namespace
}  // namespace qshard
