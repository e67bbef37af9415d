#include "kernels/grouped/grouped_gemm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <vector>

namespace qshard {
namespace {

constexpr int64_t kTileRows[] = {64, 128, 256};

class GroupedGemmTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_grouped_gemm(at::Device(at::kCUDA, 0))) GTEST_SKIP() << "needs a Hopper GPU";
  }

  static at::TensorOptions floats() { return at::TensorOptions(at::kFloat).device(at::kCUDA); }
  static at::Tensor codes(at::IntArrayRef sizes) {
    return at::randn(sizes, floats()).to(at::kFloat8_e4m3fn);
  }
  static at::Tensor ends(std::vector<int32_t> values) {
    return at::tensor(values, at::TensorOptions(at::kInt).device(at::kCUDA));
  }
};

// The product without scales, in float32, is what the kernel multiplies by them.
TEST_F(GroupedGemmTest, VectorsScaleRowsAndColumnsOfTheProduct) {
  constexpr int64_t kTokens = 333, kN = 208, kK = 272;
  GroupedOperands with;
  with.a = codes({kTokens, kK});
  with.b = codes({3, kN, kK});
  with.offs = ends({70, 70, 330});
  with.tokens = kTokens;
  with.dtype = at::kFloat;
  with.a_group_scales = with.b_group_scales = at::ones({3}, floats());
  const at::Tensor product = grouped_gemm("test", with);
  const at::Tensor of_rows = at::rand({kTokens}, floats()) + 0.5;
  const at::Tensor of_columns = at::rand({3, kN}, floats()) + 0.5;
  const at::Tensor of_groups = at::rand({3}, floats()) + 0.5;
  const at::Tensor counts =
      at::tensor({70, 0, 263}, at::TensorOptions(at::kLong).device(at::kCUDA));
  const auto of_each_row = [&](const at::Tensor& by_group) {
    return at::repeat_interleave(by_group, counts, 0);
  };
  for (const int64_t tile_rows : kTileRows) {
    with.tile_rows = tile_rows;
    for (const bool transposes : {false, true}) {
      GroupedOperands own = with;
      if (transposes) {
        own.b = with.b.view(at::kByte).transpose(1, 2).contiguous().view(at::kFloat8_e4m3fn);
        own.contract_rows = true;
      }
      own.a_group_scales = own.b_group_scales = at::Tensor();
      own.a_row_vector = of_rows;
      own.b_row_vector = of_columns;
      EXPECT_TRUE(grouped_gemm("test", own)
                      .equal(product * (of_rows.unsqueeze(1) * of_each_row(of_columns))));
      own.b_row_vector = at::Tensor();
      own.b_group_scales = of_groups;
      EXPECT_TRUE(grouped_gemm("test", own)
                      .equal(product * (of_rows * of_each_row(of_groups)).unsqueeze(1)));
      own.a_row_vector = at::Tensor();
      own.a_group_scales = of_groups;
      own.b_group_scales = at::Tensor();
      own.b_row_vector = of_columns;
      EXPECT_TRUE(
          grouped_gemm("test", own)
              .equal(product * (of_each_row(of_groups).unsqueeze(1) * of_each_row(of_columns))));
    }
  }
}

TEST_F(GroupedGemmTest, VectorsScaleGradientsOfWeights) {
  constexpr int64_t kM = 144, kN = 208, kWidth = 640;
  GroupedOperands with;
  with.a = codes({kM, kWidth});
  with.b = codes({kN, kWidth});
  with.offs = ends({128, 128, 512});
  with.tokens = 512;
  with.dtype = at::kFloat;
  with.a_group_scales = with.b_group_scales = at::ones({3}, floats());
  const at::Tensor product = grouped_gemm("test", with);
  const at::Tensor of_rows = at::rand({3, kM}, floats()) + 0.5;
  const at::Tensor of_columns = at::rand({3, kN}, floats()) + 0.5;
  const at::Tensor expected = product * (of_rows.unsqueeze(2) * of_columns.unsqueeze(1));
  with.a_group_scales = with.b_group_scales = at::Tensor();
  with.a_row_vector = of_rows;
  with.b_row_vector = of_columns;
  for (const int64_t tile_rows : kTileRows) {
    with.tile_rows = tile_rows;
    EXPECT_TRUE(grouped_gemm("test", with).equal(expected));
  }
}

// A gradient in E5M2, with the transposes that torch makes beside those of the kernel.
TEST_F(GroupedGemmTest, WideGradientsContractRowsOfMatrices) {
  GroupedOperands with;
  with.a = at::randn({200, 400}, floats()).to(at::kFloat8_e5m2);
  with.b = codes({3, 144, 400});
  with.offs = ends({64, 70, 200});
  with.tokens = 200;
  with.a_group_scales = with.b_group_scales = at::rand({3}, floats()) + 0.5;
  const at::Tensor expected = grouped_gemm("test", with);
  with.b = with.b.view(at::kByte).transpose(1, 2).contiguous().view(at::kFloat8_e4m3fn);
  with.contract_rows = true;
  for (const int64_t tile_rows : kTileRows) {
    with.tile_rows = tile_rows;
    EXPECT_TRUE(grouped_gemm("test", with).equal(expected));
  }
}

}  // namespace
}  // namespace qshard
