// Scalar numerics of row-local scales and FP4, the layout of their bytes, and which blocks are cut.
#include "kernels/numerics/row_scales.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <vector>

#include "kernels/format/boundary_blocks.h"
#include "test/cpp/cases/row_scale_reference.h"

namespace qshard::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();
const float kNaN = std::nanf("");

// Every exponent, with the mantissas at which a power of two, 448 or 2688 times one is passed.
std::vector<float> floats_of_every_exponent() {
  std::vector<float> out{0.f, kInf, kNaN};
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const uint32_t edge : {0u, 0x600000u, 0x280000u, 0x800000u}) {
      for (int32_t offset = -40; offset <= 40; ++offset) {
        const uint32_t mantissa = edge + static_cast<uint32_t>(offset);
        if (mantissa <= kMantissaMask) out.push_back(bits_float((exponent << 23) | mantissa));
      }
    }
    for (uint32_t mantissa = 0; mantissa <= kMantissaMask; mantissa += 65521) {
      out.push_back(bits_float((exponent << 23) | mantissa));
    }
  }
  return out;
}

bool same_float(float a, float b) {
  return float_bits(a) == float_bits(b) || (std::isnan(a) && std::isnan(b));
}

TEST(E2M1, DecodesEveryCode) {
  for (uint8_t code = 0; code < 16; ++code) {
    const float expected = kE2M1Values[code & 7] * (code < 8 ? 1.f : -1.f);
    EXPECT_EQ(float_bits(decode_e2m1(code)), float_bits(expected)) << int{code};
    EXPECT_EQ(encode_e2m1(expected), code);
  }
}

TEST(E2M1, TiesGoToTheEvenCode) {
  const struct {
    float tie;
    uint8_t code, below, above;
  } cases[] = {{0.25f, 0, 0, 1}, {0.75f, 2, 1, 2}, {1.25f, 2, 2, 3}, {1.75f, 4, 3, 4},
               {2.5f, 4, 4, 5},  {3.5f, 6, 5, 6},  {5.f, 6, 6, 7}};
  for (const auto& c : cases) {
    EXPECT_EQ(encode_e2m1(c.tie), c.code) << c.tie;
    EXPECT_EQ(encode_e2m1(std::nextafter(c.tie, 0.f)), c.below) << c.tie;
    EXPECT_EQ(encode_e2m1(std::nextafter(c.tie, 9.f)), c.above) << c.tie;
    EXPECT_EQ(encode_e2m1(-c.tie), c.code | 8) << c.tie;
  }
}

TEST(E2M1, SaturatesAndKeepsSigns) {
  for (const float x : {6.f, 7.f, 8.f, 1e30f, kMax, kInf, kNaN}) {
    EXPECT_EQ(encode_e2m1(x), 7) << x;
    EXPECT_EQ(encode_e2m1(-x), 15) << x;
  }
  for (const float x : {0.f, std::numeric_limits<float>::denorm_min(), 1e-38f}) {
    EXPECT_EQ(encode_e2m1(x), 0);
    EXPECT_EQ(encode_e2m1(-x), 8);
  }
}

TEST(E2M1, EncodesAsTheNearestOfTheTable) {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 16381) {
    const float x = bits_float(static_cast<uint32_t>(bits));
    ASSERT_EQ(encode_e2m1(x), reference_e2m1(x)) << x;
  }
}

// In integers: amax = m * 2^k is at most 448 * 2^e, and above 448 * 2^(e - 1).
TEST(E8M0, IsTheSmallestThatKeepsTheBlockBelow448) {
  const auto fits = [](uint64_t m, int shift) {  // m <= 448 * 2^shift
    return shift >= 0 ? shift > 30 || m <= uint64_t{448} << shift
                      : shift > -30 && m << -shift <= 448;
  };
  for (const float amax : floats_of_every_exponent()) {
    if (!std::isfinite(amax)) continue;
    const uint32_t bits = float_bits(amax);
    const uint32_t exponent = bits >> 23;
    const uint64_t m = (bits & kMantissaMask) | (exponent ? uint64_t{1} << 23 : 0);
    const int k = static_cast<int>(exponent ? exponent : 1) - 150;
    const int e = int{e8m0_from_amax(amax)} - 127;
    ASSERT_TRUE(m == 0 || fits(m, e - k)) << amax;
    ASSERT_TRUE(e == -127 || !fits(m, e - 1 - k)) << amax;
    ASSERT_EQ(e8m0_from_amax(-amax), e + 127);
  }
}

TEST(E8M0, Specials) {
  EXPECT_EQ(e8m0_from_amax(0.f), 0);
  EXPECT_EQ(e8m0_from_amax(448.f), 127);
  EXPECT_EQ(e8m0_from_amax(std::nextafter(448.f, kInf)), 128);
  EXPECT_EQ(e8m0_from_amax(kMax), 247);
  EXPECT_EQ(e8m0_from_amax(kInf), 254);
  EXPECT_EQ(e8m0_from_amax(kNaN), 255);
  EXPECT_EQ(e8m0_from_amax(-kNaN), 255);
}

TEST(E8M0, ScalesOfEveryByte) {
  for (int e = 0; e < 255; ++e) {
    EXPECT_EQ(e8m0_to_float(static_cast<uint8_t>(e)), std::ldexp(1.f, e - 127)) << e;
    EXPECT_EQ(e8m0_encode_scale(static_cast<uint8_t>(e)), std::ldexp(1.f, 127 - e)) << e;
  }
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
  EXPECT_EQ(e8m0_encode_scale(255), 1.f);
}

TEST(E8M0, AsFp32IsTheScaleThatBlocksInTheGridHave) {
  std::vector<float> amaxes = floats_of_every_exponent();
  amaxes.insert(amaxes.end(), {0.f, kMax, kInf, kNaN, 448.f, std::nextafter(448.f, kInf)});
  for (const float amax : amaxes) {
    const float scale = scale_from_amax(amax, kE4M3Max, /*power_of_two=*/true);
    const BlockScale found = block_scale(RowScale::kE8M0AsFp32, amax, 1.f);
    ASSERT_EQ(found.encode, scale) << amax;
    ASSERT_EQ(e8m0_to_float(found.byte), inverse_scale(scale)) << amax;
  }
}

TEST(E8M0, RescalingOfCodes) {
  EXPECT_EQ(rescaling(127, 127), 1.f);
  EXPECT_EQ(rescaling(127, 130), 0.125f);
  EXPECT_EQ(rescaling(130, 127), 1.f);
  EXPECT_EQ(encode_e4m3(448.f * rescaling(0, 255)), 0);
  EXPECT_EQ(encode_e4m3(448.f * rescaling(100, 118)), 1);
  EXPECT_EQ(encode_e4m3(448.f * rescaling(100, 100 + kMostShift)), 0);
}

TEST(Nvfp4, TensorScaleHas16BitsAndComesBack) {
  for (const float amax : floats_of_every_exponent()) {
    const float scale_inv = nvfp4_tensor_scale_inv(amax);
    ASSERT_EQ(scale_inv, reference_tensor_scale_inv(amax)) << amax;
    ASSERT_EQ(float_bits(scale_inv) & 0xffu, 0u) << amax;
    const double largest = 2688. * scale_inv;  // what the largest code reads as
    if (largest > static_cast<double>(kMax)) continue;
    ASSERT_EQ(static_cast<float>(largest), largest);
    ASSERT_EQ(nvfp4_tensor_scale_inv(static_cast<float>(largest)), scale_inv) << amax;
  }
}

TEST(Nvfp4, BlockScalesFollowTheirFormulas) {
  for (const float tensor_amax :
       {2688.f, 1.f, 3.14159f, 6e4f, 1e30f, 1e-30f, 1e-36f, 1e-44f, kMax, 0.f, kInf, kNaN}) {
    const float scale_inv = nvfp4_tensor_scale_inv(tensor_amax);
    const float scale = nvfp4_tensor_scale(scale_inv);
    for (const float amax : floats_of_every_exponent()) {
      const BlockScale got = block_scale(RowScale::kE4M3, amax, scale);
      const ReferenceScale expected = reference_nvfp4_scale(amax, scale_inv);
      ASSERT_EQ(got.byte, expected.byte) << amax << " of " << tensor_amax;
      ASSERT_EQ(got.encode, expected.encode) << amax << " of " << tensor_amax;
      const float decode = block_scale_inv(RowScale::kE4M3, got.byte, scale_inv);
      ASSERT_TRUE(same_float(decode, expected.decode)) << amax << " of " << tensor_amax;
    }
  }
}

TEST(RowScaledLayout, PlacesScalesAfterTheCodes) {
  const struct {
    const char* format;
    int64_t cols, code_bytes, row_scale_offset, row_scale_bytes, row_bytes;
  } cases[] = {
      {"mxfp8", 0, 0, 0, 0, 0},
      {"mxfp8", 1, 1, 16, 1, 32},
      {"mxfp8", 33, 33, 48, 2, 64},
      {"mxfp8", 512, 512, 512, 16, 528},
      {"mxfp8", 513, 513, 528, 17, 560},
      {"mxfp8", 4096, 4096, 4096, 128, 4224},
      {"nvfp4", 0, 0, 0, 0, 0},
      {"nvfp4", 1, 1, 16, 1, 32},
      {"nvfp4", 31, 16, 16, 2, 32},
      {"nvfp4", 33, 17, 32, 3, 48},
      {"nvfp4", 256, 128, 128, 16, 144},
      {"nvfp4", 257, 129, 144, 17, 176},
      {"nvfp4", 4096, 2048, 2048, 256, 2304},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(::testing::Message() << c.format << " " << c.cols);
    const Layout layout{&find_format(c.format), 3, c.cols, 40, 20, 0};
    EXPECT_EQ(layout.code_bytes(), c.code_bytes);
    EXPECT_EQ(layout.row_scale_offset(), c.row_scale_offset);
    EXPECT_EQ(layout.row_scale_bytes(), c.row_scale_bytes);
    EXPECT_EQ(layout.row_bytes(), c.row_bytes);
    EXPECT_EQ(layout.image_bytes(), 3 * c.row_bytes);
    EXPECT_EQ(layout.grid_numel(), layout.format->has_tensor_scale() && c.cols ? 2 : 0);
  }
}

// ------------------------------------------------------------------------------------- boundary

std::vector<int64_t> cut_block_rows(const Layout& layout, int64_t chunk) {
  std::map<int64_t, std::set<int64_t>> holders;
  for (int64_t row = 0; row < layout.logical_rows; ++row) {
    holders[layout.block_row(row)].insert(row / chunk);
  }
  std::vector<int64_t> out;
  for (const auto& [block_row, ranks] : holders) {
    if (ranks.size() > 1) out.push_back(block_row);
  }
  return out;
}

TEST(BoundaryBlocks, AreTheBlockRowsThatSeveralRanksHold) {
  for (const char* format : {"mxfp8", "nvfp4"}) {
    for (int64_t rows = 0; rows < 140; ++rows) {
      for (int64_t ranks = 1; ranks < 20; ++ranks) {
        SCOPED_TRACE(::testing::Message() << format << " " << rows << " rows, " << ranks);
        const int64_t chunk = std::max<int64_t>(1, ceil_div(rows, ranks));
        Layout layout{&find_format(format), chunk, 40, rows, rows, 0};
        const std::vector<int64_t> expected = cut_block_rows(layout, chunk);
        const auto index_of = [&](int64_t row) -> int64_t {
          const auto at = std::find(expected.begin(), expected.end(), layout.block_row(row));
          return at == expected.end() ? -1 : at - expected.begin();
        };
        for (int64_t rank = 0; rank < ranks; ++rank) {
          layout.row_offset = rank * chunk;
          const BoundaryBlocks boundary = find_boundary_blocks(layout, ranks);
          ASSERT_EQ(boundary.rows, static_cast<int64_t>(expected.size()));
          const int64_t live = layout.live_rows();
          ASSERT_EQ(boundary.first, live ? index_of(layout.row_offset) : -1);
          ASSERT_EQ(boundary.last, live ? index_of(layout.row_offset + live - 1) : -1);
          ASSERT_EQ(amax_numel(layout, boundary),
                    layout.grid_numel() + boundary.rows * layout.block_cols());
        }
      }
    }
  }
}

// FSDP2 gives the one matrix of a 3-D tensor to one rank, whatever torch.chunk does to its rows.
TEST(BoundaryBlocks, ABlockThatLiesWholeInAShardHasNoEntry) {
  for (const char* format : {"mxfp8", "nvfp4", "mxfp8_1x32"}) {
    for (const int64_t rows : {1, 15, 32, 33, 100}) {
      for (const int64_t ranks : {2, 3, 7}) {
        SCOPED_TRACE(::testing::Message() << format << " " << rows << " rows, " << ranks);
        const BoundaryBlocks boundary =
            find_boundary_blocks({&find_format(format), rows, 40, rows, rows, 0}, ranks);
        EXPECT_EQ(boundary.first, -1);
        EXPECT_EQ(boundary.last, -1);
        const Layout without_rows{&find_format(format), 0, 40, rows, rows, rows};
        EXPECT_EQ(boundary.rows, find_boundary_blocks(without_rows, ranks).rows);
      }
    }
  }
}

TEST(BoundaryBlocks, OfTwoImagesAreThoseOfTheColumnwiseOne) {
  const Format& format = find_format("mxfp8_1x32");
  for (const int64_t ranks : {1, 2, 3, 7, 40}) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t chunk = ceil_div(320, ranks);
      const Layout layout{&format, chunk, 40, 320, 320, rank * chunk};
      const BoundaryBlocks boundary = find_boundary_blocks(layout, ranks);
      const BoundaryBlocks square =
          find_boundary_blocks({&find_format("mxfp8"), chunk, 40, 320, 320, rank * chunk}, ranks);
      EXPECT_EQ(boundary.rows, square.rows);
      EXPECT_EQ(boundary.first, square.first);
      EXPECT_EQ(boundary.last, square.last);
      EXPECT_EQ(amax_numel(layout, boundary), boundary.rows * 40);
      Layout gathered = layout;
      gathered.images = Images::kRowwise;
      EXPECT_EQ(find_boundary_blocks(gathered, ranks).rows, 0);
    }
  }
}

TEST(BoundaryBlocks, RanksWithoutRowsKnowHowManyThereAre) {
  const Layout layout{&find_format("mxfp8"), 10, 40, 100, 100, 100};
  const BoundaryBlocks boundary = find_boundary_blocks(layout, 10);
  EXPECT_EQ(boundary.rows, 3);  // rows 96 to 99 are of one rank
  EXPECT_EQ(boundary.first, -1);
  EXPECT_EQ(boundary.last, -1);
}

TEST(BoundaryBlocks, NoneWhereNothingIsAgreedOnOrCut) {
  const auto none = [](const Layout& layout, int64_t ranks) {
    const BoundaryBlocks boundary = find_boundary_blocks(layout, ranks);
    return boundary.rows == 0 && boundary.first == -1 && boundary.last == -1;
  };
  EXPECT_TRUE(none({&find_format("float8_blockwise"), 10, 40, 100, 100, 10}, 10));
  EXPECT_TRUE(none({&find_format("float8_tensorwise"), 10, 40, 100, 100, 10}, 10));
  EXPECT_TRUE(none({&find_format("mxfp8"), 10, 0, 100, 100, 10}, 10));
  EXPECT_TRUE(none({&find_format("mxfp8"), 64, 40, 256, 256, 64}, 4));
  EXPECT_TRUE(none({&find_format("nvfp4"), 40, 40, 120, 20, 40}, 3));  // two matrices each
  EXPECT_TRUE(none({&find_format("nvfp4"), 60, 40, 100, 20, 60}, 2));  // three and two
}

TEST(BoundaryBlocks, AShardThatIsNoChunkIsAnError) {
  for (const int64_t offset : {5, 20, 40}) {
    const Layout layout{&find_format("mxfp8"), 7, 40, 128, 128, offset};
    EXPECT_THROW(find_boundary_blocks(layout, 4), std::invalid_argument) << offset;
  }
}

}  // namespace
}  // namespace qshard::testing
