// What torch's grouped GEMM of block-scaled codes is handed (kernels/grouped/block_scaled_codes.h):
// the same bytes on each device. test_block_scaled_experts.py says what they stand for.
#include "kernels/grouped/block_scaled_codes.h"
#include "test/cpp/cases/gemm_cases.h"

namespace qshard::testing {
namespace {

constexpr int64_t kTokens = 300, kOut = 144, kIn = 200, kExperts = 4;
constexpr const char* kNames[] = {"mxfp8", "mxfp8_1x32[rowwise]", "nvfp4", "nvfp4_1x16[4over6]",
                                  "nvfp4[no_hadamard]"};

/// 16 of them, of a column, have an exact sum in fp32: the Hadamard transform's.
at::Tensor few_bits(int64_t rows, int64_t cols) {
  const at::Tensor sizes = at::pow(2., at::randint(-3, 4, {1, cols}));
  return at::randint(-127, 128, {rows, cols}).mul(sizes).to(at::kBFloat16);
}

void expect_same(const BlockScaledCodes& got, const BlockScaledCodes& expected) {
  EXPECT_EQ(got.rows, expected.rows);
  EXPECT_TRUE(at::equal(got.codes.cpu(), expected.codes));
  EXPECT_TRUE(at::equal(got.scales.cpu(), expected.scales));
  ASSERT_EQ(got.tensor_scales.defined(), expected.tensor_scales.defined());
  if (!got.tensor_scales.defined()) return;
  EXPECT_TRUE(at::equal(got.tensor_scales.cpu(), expected.tensor_scales));
}

class BlockScaledCodesOfGroups : public ::testing::TestWithParam<const char*> {};

TEST_P(BlockScaledCodesOfGroups, ActivationsAreThoseOfTheCpu) {
  at::manual_seed(0);
  const Format& format = find_format(GetParam());
  const at::Tensor x = few_bits(kTokens, kIn);
  const at::Tensor offs = at::tensor({130, 130, 131, 290}, at::kInt);
  const at::Tensor words = at::randint(1 << 30, {2, 3}, at::kInt);
  for (const bool rounds : {false, true}) {
    const auto codes_on = [&](at::Device device) {
      GradientRounding rounding;
      if (rounds) rounding = {words[0].to(device), words[1].to(device)};
      return quantize_block_scaled_groups(x.to(device), format,
                                          {.rowwise = true, .columnwise = true},
                                          RowGroups{offs.to(device)}, rounding);
    };
    const GroupCodes expected = codes_on(at::kCPU);
    ASSERT_EQ(expected.block_rows.codes.size(0), kTokens);
    ASSERT_TRUE(at::equal(expected.column_ends, at::tensor({256, 256, 384, 640}, at::kInt)));
    for (const at::Device device : devices()) {
      SCOPED_TRACE(::testing::Message() << device << " rounds " << rounds);
      const GroupCodes got = codes_on(device);
      expect_same(got.block_rows, expected.block_rows);
      expect_same(got.block_columns, expected.block_columns);
      EXPECT_TRUE(at::equal(got.column_ends.cpu(), expected.column_ends));
    }
  }
}

TEST_P(BlockScaledCodesOfGroups, WeightsAreThoseOfTheCpu) {
  at::manual_seed(0);
  Layout layout = whole(GetParam(), kExperts * kOut, kIn);
  layout.matrix_rows = kOut;
  const at::Tensor values = few_bits(kExperts * kOut, kIn).to(at::kFloat);
  for (const bool transposes : {false, true}) {
    if (transposes && !layout.format->gemm.transposes_weight) continue;
    const auto codes_on = [&](at::Device device) {
      const ExpertWeights weights{linear_weight(values.to(device), layout), kExperts, kOut, kOut};
      return block_scaled_weights(weights, transposes);
    };
    const BlockScaledCodes expected = codes_on(at::kCPU);
    ASSERT_EQ(expected.codes.size(0), kExperts);
    for (const at::Device device : devices()) {
      SCOPED_TRACE(::testing::Message() << device << " transposes " << transposes);
      expect_same(codes_on(device), expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, BlockScaledCodesOfGroups, ::testing::ValuesIn(kNames));

}  // namespace
}  // namespace qshard::testing
