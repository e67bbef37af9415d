#include <gtest/gtest.h>

#include <stdexcept>

#include "kernels/format/layout.h"

namespace qshard {
namespace {

TEST(Formats, AreFoundByName) {
  for (const Format& format : formats()) EXPECT_EQ(&find_format(format.name), &format);
}

TEST(Formats, AnUnknownNameNamesTheKnownOnes) {
  try {
    find_format("float7");
    FAIL();
  } catch (const std::invalid_argument& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("float7"), std::string::npos);
    for (const Format& format : formats()) EXPECT_NE(what.find(format.name), std::string::npos);
  }
}

TEST(Formats, VariantsAreOneObjectByTheirOptions) {
  const Format& delayed = find_format("float8_delayed");
  EXPECT_EQ(delayed.amax_history.length, 1024);
  EXPECT_EQ(&find_format("float8_delayed[margin=0,history=1024]"), &delayed);
  const Format& variant = find_format("float8_delayed[history=16,e4m3,margin=2,most_recent]");
  EXPECT_EQ(variant.name, "float8_delayed[margin=2,history=16,most_recent,e4m3]");
  EXPECT_EQ(&find_format(variant.name), &variant);
  EXPECT_EQ(variant.amax_history.length, 16);
  EXPECT_EQ(variant.amax_history.margin, 2);
  EXPECT_TRUE(variant.amax_history.most_recent);
  EXPECT_EQ(variant.activations.gradient_dtype, DType::kFloat8E4M3);
  EXPECT_EQ(variant.index, delayed.index);
  EXPECT_TRUE(find_format("nvfp4[stochastic]").stochastic_rounding);
  EXPECT_FALSE(find_format("nvfp4").stochastic_rounding);
  EXPECT_TRUE(find_format("mxfp8_1x32[phase]").gathers_by_phase);
  EXPECT_FALSE(find_format("mxfp8_1x32").gathers_by_phase);
  EXPECT_EQ(find_format("mxfp8_1x32[stochastic,phase]").name, "mxfp8_1x32[phase,stochastic]");
  EXPECT_EQ(find_format("nvfp4[emulate,4over6,nearest_gradients,no_hadamard]").name,
            "nvfp4[no_hadamard,nearest_gradients,4over6,emulate]");
  const Format& rows = find_format("float8_blockwise[stochastic,x_block_scaling_dim=1]");
  EXPECT_EQ(rows.name, "float8_blockwise[x_block_scaling_dim=1,stochastic]");
  EXPECT_EQ(rows.activations.packed_input_columns, ScaleMode::kBlock1x128);
  EXPECT_EQ(&find_format("float8_blockwise[x_block_scaling_dim=2]"),
            &find_format("float8_blockwise"));
}

TEST(Formats, ParsedByValueTheyAreTheSame) {
  const Format parsed = parse_format("float8_delayed[e4m3,history=16,margin=2]");
  const Format& found = find_format("float8_delayed[e4m3,history=16,margin=2]");
  EXPECT_EQ(parsed.name, "float8_delayed");
  EXPECT_EQ(parsed.amax_history.length, found.amax_history.length);
  EXPECT_EQ(parsed.amax_history.margin, found.amax_history.margin);
  EXPECT_EQ(parsed.activations.gradient_dtype, found.activations.gradient_dtype);
  EXPECT_EQ(parsed.index, found.index);
}

TEST(Formats, WrongOptionsAreNamed) {
  for (const char* name :
       {"nvfp4[]", "nvfp4[", "nvfp4[stochastic", "nvfp4[margin=1]", "mxfp8[e4m3]", "mxfp8[phase]",
        "mxfp8[4over6]", "mxfp8[no_hadamard]", "float8_delayed[margin=]",
        "float8_delayed[margin=-1]", "float8_delayed[history=0]", "float8_delayed[history=1x]",
        "float8_delayed[stochastic,]", "float8_delayed[nearest]",
        "float8_delayed[history=99999999999999999999]", "float8_blockwise[x_block_scaling_dim=3]",
        "float8_tensorwise[x_block_scaling_dim=2]", "mxfp8[x_block_scaling_dim=2]"}) {
    try {
      find_format(name);
      FAIL() << name;
    } catch (const std::invalid_argument& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find("known options: stochastic"), std::string::npos) << what;
    }
  }
}

struct LayoutCase {
  const char* format;
  int64_t rows, cols, logical_rows, matrix_rows, row_offset;
  int64_t row_bytes, grid_rows, grid_cols, live_rows;
};

class Layouts : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(Layouts, Arithmetic) {
  const LayoutCase& c = GetParam();
  const Layout layout{&find_format(c.format), c.rows,        c.cols,
                      c.logical_rows,         c.matrix_rows, c.row_offset};
  EXPECT_EQ(layout.row_bytes(), c.row_bytes);
  EXPECT_EQ(layout.image_bytes(), c.rows * c.row_bytes);
  EXPECT_EQ(layout.grid_rows(), c.grid_rows);
  EXPECT_EQ(layout.grid_cols(), c.grid_cols);
  EXPECT_EQ(layout.live_rows(), c.live_rows);
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Layouts,
    ::testing::Values(LayoutCase{"float8_tensorwise", 8, 16, 8, 8, 0, 16, 1, 1, 8},
                      LayoutCase{"float8_tensorwise", 8, 17, 8, 4, 0, 32, 2, 1, 8},
                      LayoutCase{"float8_tensorwise", 8, 0, 8, 8, 0, 0, 1, 0, 8},
                      LayoutCase{"float8_tensorwise", 0, 8, 0, 0, 0, 16, 0, 1, 0},
                      LayoutCase{"float8_rowwise", 64, 129, 300, 150, 250, 144, 300, 1, 50},
                      LayoutCase{"float8_rowwise", 8, 0, 8, 8, 0, 0, 8, 0, 8},
                      LayoutCase{"float8_rowwise", 0, 8, 0, 0, 0, 16, 0, 1, 0},
                      LayoutCase{"float8_blockwise", 64, 129, 300, 300, 250, 144, 3, 2, 50},
                      LayoutCase{"float8_blockwise", 64, 128, 300, 150, 0, 128, 4, 1, 64},
                      LayoutCase{"float8_blockwise", 4, 128, 300, 300, 300, 128, 3, 1, 0},
                      LayoutCase{"float8_blockwise", 4, 128, 8, 8, 12, 128, 1, 1, 0},
                      LayoutCase{"mxfp8", 64, 129, 300, 300, 250, 160, 0, 0, 50},
                      LayoutCase{"mxfp8", 4, 128, 300, 300, 300, 144, 0, 0, 0},
                      LayoutCase{"mxfp8_1x32", 64, 129, 320, 320, 250, 320, 0, 0, 64},
                      LayoutCase{"mxfp8_1x32[phase]", 4, 128, 64, 32, 62, 288, 0, 0, 2},
                      LayoutCase{"nvfp4", 64, 129, 300, 150, 0, 96, 2, 1, 64},
                      LayoutCase{"nvfp4", 8, 0, 8, 8, 0, 0, 1, 0, 8},
                      LayoutCase{"nvfp4", 0, 8, 0, 0, 0, 32, 0, 1, 0}));

TEST(Layout, GridRowsStartAnewInEveryMatrix) {
  const Layout layout{&find_format("float8_blockwise"), 600, 8, 600, 200, 0};
  EXPECT_EQ(layout.grid_row(0), 0);
  EXPECT_EQ(layout.grid_row(127), 0);
  EXPECT_EQ(layout.grid_row(128), 1);
  EXPECT_EQ(layout.grid_row(199), 1);
  EXPECT_EQ(layout.grid_row(200), 2);
  EXPECT_EQ(layout.grid_row(599), 5);
}

TEST(Layout, RowScaledFormatsHaveAGridRowForAMatrixAndBlockRowsBesides) {
  const Layout layout{&find_format("nvfp4"), 60, 8, 60, 20, 0};
  EXPECT_EQ(layout.grid_row(19), 0);
  EXPECT_EQ(layout.grid_row(59), 2);
  EXPECT_EQ(layout.block_row(15), 0);
  EXPECT_EQ(layout.block_row(16), 1);
  EXPECT_EQ(layout.block_row(20), 2);
  EXPECT_EQ(layout.block_row(59), 5);
}

TEST(Layout, LayoutsMadeOfAnotherDifferInWhatTheyAreNamedFor) {
  const Layout shard{.format = &find_format("mxfp8_1x32"),
                     .rows = 64,
                     .cols = 96,
                     .logical_rows = 256,
                     .matrix_rows = 128,
                     .row_offset = 192,
                     .first_element = 5,
                     .full_cols = 200};
  const Layout fewer = shard.holding(8);
  EXPECT_EQ(fewer.live_rows(), 8);
  EXPECT_EQ(fewer.element(1), shard.element(1));
  const Layout padding = shard.placed(256);
  EXPECT_EQ(padding.live_rows(), 0);
  EXPECT_EQ(padding.logical_rows, 256);
  const Layout gathered = shard.holding(256).placed(0);
  EXPECT_TRUE(gathered.holds_all_rows());
  const Layout rowwise = shard.with_images(Images::kRowwise);
  EXPECT_EQ(2 * rowwise.row_bytes(), shard.row_bytes());
  EXPECT_EQ(shard.columnwise().row_bytes(), shard.row_bytes());

  const Layout own = own_tensor(shard, 32);
  EXPECT_TRUE(own.holds_all_rows());
  EXPECT_EQ(own.matrices(), 2);
  EXPECT_EQ(own.element(1), 96);
  EXPECT_EQ(with_cols(own, 32).within_full_tensor(7, 40, 0).element(1), 47);
}

TEST(Layout, RowsOfEachMatrixLieInTheLogicalTensor) {
  const Layout whole{.format = &find_format("float8_blockwise"),
                     .rows = 3 * 256,
                     .cols = 64,
                     .logical_rows = 3 * 256,
                     .matrix_rows = 256};
  const Layout shard = holding_of_each(whole, 128, 128);
  EXPECT_EQ(shard.rows, 3 * 128);
  EXPECT_EQ(shard.live_rows(), shard.rows);
  EXPECT_FALSE(shard.holds_all_rows());
  EXPECT_TRUE(shard.owns_its_blocks());
  EXPECT_FALSE(holding_of_each(whole, 64, 64).owns_its_blocks());
  EXPECT_EQ(logical_row(shard, 0), 128);
  EXPECT_EQ(logical_row(shard, 127), 255);
  EXPECT_EQ(logical_row(shard, 128), 256 + 128);
  EXPECT_EQ(run_from(shard, 100, 200), 28);
  EXPECT_EQ(run_from(shard, 128, 100), 100);
  const Layout run = with_run(shard, 130);
  EXPECT_TRUE(is_one_range(run));
  EXPECT_EQ(logical_row(run, 130), 256 + 130);
  EXPECT_TRUE(is_one_range(holding_of_each(whole, 0, 256)));
  EXPECT_TRUE(own_tensor(shard, 128).holds_all_rows());

  // A part of 100 rows and 64 columns of matrices of 300 x 80.
  const Layout part = own_tensor(whole.holding(200), 100).within_full_tensor(7, 80, 300);
  EXPECT_EQ(part.element(99), 7 + 99 * 80);
  EXPECT_EQ(part.element(100), 7 + 300 * 80);
}

}  // namespace
}  // namespace qshard
