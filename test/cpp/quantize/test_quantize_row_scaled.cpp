// Formats whose block scales lie in the row image: what ranks agree on, special blocks, ties.
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class QuantizeRowScaled : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {
 protected:
  const Format& format() const { return find_format(std::get<0>(GetParam())); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  Layout whole(int64_t rows, int64_t cols) const {
    return fitted({&format(), rows, cols, rows, rows, 0});
  }
  // The next number of rows that a matrix of this format can have.
  int64_t fit(int64_t rows) const { return whole(rows, 0).matrix_rows; }

  void expect_reference(const at::Tensor& values) const {
    const Layout layout = whole(values.size(0), values.size(1));
    const Quantized expected = reference(values, layout);
    for (const at::Device device : devices()) {
      const Quantized q = quantized(values.to(device), layout);
      EXPECT_TRUE(same_values(q.amax, expected.amax)) << device;
      EXPECT_TRUE(at::equal(q.grid.cpu(), expected.grid)) << device;
      EXPECT_TRUE(at::equal(q.image.cpu(), expected.image)) << device;
    }
  }

  // All ranks of torch.chunk on one device, those without rows too.
  void expect_shards_equal_the_whole(const at::Tensor& values, int64_t matrix_rows, int64_t chunk,
                                     int64_t ranks) const {
    const int64_t rows = values.size(0), cols = values.size(1);
    const Layout layout{&format(), rows, cols, rows, matrix_rows, 0};
    const Quantized expected = reference(values, layout);
    for (const at::Device device : devices()) {
      SCOPED_TRACE(::testing::Message() << device << ", " << rows << " rows on " << ranks);
      std::vector<at::Tensor> images;
      for (const Quantized& q : quantized_shards(values, layout, chunk, ranks, device, 1e6)) {
        ASSERT_TRUE(at::equal(q.grid.cpu(), expected.grid));
        images.push_back(q.image.cpu());
      }
      const at::Tensor gathered = at::cat(images);
      ASSERT_TRUE(at::equal(gathered.narrow(0, 0, rows), expected.image));
      const at::Tensor padding = gathered.narrow(0, rows, gathered.size(0) - rows);
      ASSERT_EQ(padding.count_nonzero().item<int64_t>(), 0);
    }
  }
};

TEST_P(QuantizeRowScaled, RowsDoNotDependOnTheRanks) {
  at::manual_seed(0);
  for (const int64_t some : {1, 5, 16, 33, 97, 256, 300}) {
    const int64_t rows = fit(some);
    at::Tensor values = random_values(rows, 70, dtype());
    values[rows / 2][3] = kNaN;
    values[rows - 1][69] = -kInf;
    for (const int64_t ranks : {1, 2, 3, 4, 7, 16}) {
      expect_shards_equal_the_whole(values, rows, ceil_div(rows, ranks), ranks);
    }
  }
}

TEST_P(QuantizeRowScaled, RanksOfExpertWeightsHoldWholeMatrices) {
  at::manual_seed(1);
  const int64_t rows = fit(45);
  const at::Tensor values = random_values(6 * rows, 37, dtype());
  for (const int64_t ranks : {1, 2, 3, 4, 6, 8}) {
    expect_shards_equal_the_whole(values, rows, rows * ceil_div(6, ranks), ranks);
  }
}

TEST_P(QuantizeRowScaled, AMatrixHasOnlyItsOwnScales) {
  at::manual_seed(2);
  const int64_t rows = fit(30);
  const at::Tensor values = random_values(3 * rows, 50, dtype());
  const Quantized together = quantized(values, {&format(), 3 * rows, 50, 3 * rows, rows, 0});
  for (int64_t matrix = 0; matrix < 3; ++matrix) {
    const Quantized alone = quantized(values.narrow(0, rows * matrix, rows), whole(rows, 50));
    EXPECT_TRUE(at::equal(together.image.narrow(0, rows * matrix, rows), alone.image));
  }
}

// Tasks of all formats in one call, some with agreed blocks.
TEST_P(QuantizeRowScaled, MixedFormatsAtOnce) {
  at::manual_seed(3);
  for (const at::Device device : devices()) {
    std::vector<at::Tensor> values;
    std::vector<Layout> layouts;
    std::vector<Quantized> results;
    std::vector<QuantizeTask> tasks;
    for (int64_t i = 0; i < 90; ++i) {
      const Format& format = i % 3 ? this->format() : formats()[i % formats().size()];
      const int64_t rows = i * 7 % 150;
      layouts.push_back(fitted({&format, rows, 1 + i * 5 % 290, rows, rows, 0}));
      values.push_back(random_values(rows, layouts.back().cols, kDtypes[i % 3]).to(device));
      results.push_back(outputs_for(values.back(), layouts.back()));
      tasks.push_back(task_of(values.back(), layouts.back(), {}, results.back()));
    }
    compute_amax(tasks, stream_of(device));
    quantize(tasks, stream_of(device));
    std::vector<at::Tensor> read;
    std::vector<DequantizeTask> reads;
    for (size_t i = 0; i < tasks.size(); ++i) {
      const Quantized expected = reference(values[i], layouts[i]);
      EXPECT_TRUE(same_values(results[i].amax, expected.amax)) << device << i;
      EXPECT_TRUE(at::equal(results[i].grid.cpu(), expected.grid)) << device << i;
      EXPECT_TRUE(at::equal(results[i].image.cpu(), expected.image)) << device << i;
      read.push_back(at::full_like(values[i], 7));
      reads.push_back({layouts[i], tasks[i].image, tasks[i].grid, 0, layouts[i].rows,
                       tasks[i].value_dtype, read.back().mutable_data_ptr()});
    }
    dequantize(reads, stream_of(device));
    for (size_t i = 0; i < tasks.size(); ++i) {
      const at::Tensor expected = reference_values(reference(values[i], layouts[i]), layouts[i]);
      EXPECT_TRUE(same_values(read[i], expected.to(read[i].scalar_type()))) << device << i;
    }
  }
}

TEST_P(QuantizeRowScaled, OnlyTheBlockOfANaNIsNaN) {
  const int64_t rows = format().scale.block_rows;
  const int64_t cols = format().scale.block_cols;
  for (const float nan : {kNaN, -kNaN}) {
    at::Tensor values = at::ones({3 * rows, 3 * cols - 1}).to(dtype());
    values[2 * rows - 1][2 * cols + 1] = nan;
    expect_reference(values);
    const Layout layout = whole(values.size(0), values.size(1));
    for (const at::Device device : devices()) {
      const Quantized q = quantized(values.to(device), layout);
      const at::Tensor read = dequantized(q, layout, dtype(), 0, layout.rows).cpu();
      at::Tensor expected = at::zeros(read.sizes(), at::kBool);
      expected.narrow(0, rows, rows).narrow(1, 2 * cols, cols - 1).fill_(true);
      EXPECT_TRUE(at::equal(read.isnan(), expected)) << device;
      EXPECT_FALSE(read.signbit().any().item<bool>()) << device;
    }
  }
}

TEST_P(QuantizeRowScaled, ZeroInfiniteAndTinyBlocks) {
  const int64_t block = format().scale.block_cols;
  at::Tensor values = at::full({block, 7 * block}, 1.).to(dtype());
  const float sizes[] = {0.f, -0.f, 1e-45f, 6e-8f, kInf, 60000.f, 1e-3f};
  for (int64_t i = 0; i < 7; ++i) {
    values.narrow(1, i * block, block).fill_(sizes[i]);
    values[3].narrow(0, i * block, 5).mul_(-0.5);
    expect_reference(values);
  }
  expect_reference(at::zeros({block + 1, block + 1}).to(dtype()));
}

// Scales are powers of two here, so the values are halfway between codes when they are encoded.
TEST_P(QuantizeRowScaled, TiesOfCodes) {
  const int64_t block = format().scale.block_cols;
  const bool fp4 = format().code_bits == 4;
  std::vector<float> points;
  const int codes = fp4 ? 7 : 0x7e;
  for (int code = 0; code < codes; ++code) {
    const auto value_of = [&](int c) {
      return fp4 ? kE2M1Values[c] : reference_e4m3(static_cast<uint8_t>(c));
    };
    const float tie = (value_of(code) + value_of(code + 1)) / 2;
    for (const float x : {tie, std::nextafter(tie, 0.f), std::nextafter(tie, 500.f)}) {
      if (points.size() % block == 0) points.push_back(format().code_max);
      points.push_back(code % 2 ? x : -x);
    }
  }
  for (const float size : {1.f, 0x1p-6f}) {
    at::Tensor values = at::tensor(points).mul(size).unsqueeze(0);
    const at::Tensor largest = at::full({1, block}, 448 * format().code_max * size);
    if (format().has_tensor_scale()) values = at::cat({largest, values}, 1);
    expect_reference(values.to(dtype()));
  }
}

INSTANTIATE_TEST_SUITE_P(All, QuantizeRowScaled,
                         ::testing::Combine(::testing::Values("mxfp8", "mxfp8_1x32", "nvfp4",
                                                              "nvfp4_1x16"),
                                            ::testing::ValuesIn(kDtypes)),
                         kernel_name);

}  // namespace
}  // namespace qshard::testing
