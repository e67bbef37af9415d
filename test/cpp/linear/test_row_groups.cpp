#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "kernels/grouped/row_groups.h"

namespace qshard {
namespace {

at::Tensor ints(std::vector<int32_t> values) { return at::tensor(values, at::kInt); }

TEST(RowGroupsTest, EndsAreClampedAndDoNotDecrease) {
  const RowGroups groups{ints({-3, 5, 2, 100})};
  EXPECT_TRUE(groups.ends(9).equal(ints({0, 5, 5, 9})));
  EXPECT_EQ(RowGroups{ints({})}.ends(9).numel(), 0);
}

TEST(RowGroupsTest, RowsOfNoneAreZeroed) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor rows = at::full({5, 2}, nan);
  rows.narrow(0, 0, 3).fill_(1);
  zero_rows_of_none(rows, ints({1, 3}));
  EXPECT_EQ(rows.sum().item<float>(), 6);
  const at::Tensor none = at::full({2, 2}, nan);
  zero_rows_of_none(none, ints({}));
  EXPECT_EQ(none.sum().item<float>(), 0);
}

TEST(RowGroupsTest, AlignedRowsBeginAtMultiplesOf8) {
  const at::Tensor ends = ints({3, 3, 12});
  const AlignedRows aligned(ends, /*total=*/14);
  EXPECT_TRUE(aligned.lengths.equal(ints({3, 0, 9})));
  EXPECT_TRUE(aligned.ends.equal(ints({8, 8, 24})));
  const at::Tensor x = at::arange(1, 15, at::kFloat).unsqueeze(1);
  const at::Tensor rows = aligned.of(x).squeeze(1);
  ASSERT_GE(rows.size(0), 24);
  EXPECT_TRUE(rows.narrow(0, 0, 3).equal(x.squeeze(1).narrow(0, 0, 3)));
  EXPECT_TRUE(rows.narrow(0, 8, 9).equal(x.squeeze(1).narrow(0, 3, 9)));
  EXPECT_EQ(rows.narrow(0, 3, 5).abs().sum().item<float>(), 0);
  EXPECT_EQ(rows.narrow(0, 17, rows.size(0) - 17).abs().sum().item<float>(), 0);
}

TEST(RowGroupsTest, RowsAreFoundAmongAlignedOnes) {
  const at::Tensor ends = ints({3, 3, 142, 150});
  const AlignedRows aligned(ends, /*total=*/152, /*alignment=*/128);
  EXPECT_TRUE(aligned.ends.equal(ints({128, 128, 384, 512})));
  ASSERT_EQ(aligned.expert_of.size(0), 640);  // 4 * 127 more than the rows, at most
  for (const auto& [row, expert] : {std::pair(0, 0), {127, 0}, {128, 2}, {383, 2}, {511, 3}}) {
    EXPECT_EQ(aligned.expert_of[row].item<int64_t>(), expert) << row;
  }
  const at::Tensor x = at::arange(1, 153, at::kFloat).unsqueeze(1);
  const at::Tensor found = aligned.of(x).index_select(0, aligned.places(ends, 152));
  EXPECT_TRUE(found.narrow(0, 0, 150).equal(x.narrow(0, 0, 150)));
}

}  // namespace
}  // namespace qshard
