// What block-scaled GEMMs (MXFP8, NVFP4) are handed: transposed values, images of activations and
// gradients in both orientations, weights and their transposes.
#include <c10/util/Exception.h>

#include <bit>

#include "kernels/format/whole_layout.h"
#include "kernels/linear/block_scaled_operand.h"
#include "kernels/numerics/hadamard.h"
#include "kernels/transpose/transpose.h"
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

struct Shape {
  int64_t rows, cols;
};
constexpr Shape kShapes[] = {{1, 1},    {16, 16},   {32, 32},  {33, 17},  {64, 48},
                             {100, 30}, {144, 272}, {128, 64}, {300, 520}};

// The transform's matrix, from its definition.
at::Tensor hadamard_matrix() {
  at::Tensor matrix = at::empty({16, 16}, at::kDouble);
  auto entries = matrix.accessor<double, 2>();
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      const bool negative =
          (std::popcount(static_cast<unsigned>(i & j)) + (kHadamardSigns >> j)) & 1;
      entries[i][j] = negative ? -0.25 : 0.25;
    }
  }
  return matrix;
}

// x (M, K) as quantized_columns quantizes it, on the CPU; sums of float64 are exact here.
at::Tensor naive_columns(const at::Tensor& x, bool hadamard) {
  const at::Tensor padded = at::constant_pad_nd(x, {0, 0, 0, round_up(x.size(0), 32) - x.size(0)});
  const at::Tensor columns = padded.t().contiguous();
  if (!hadamard) return columns;
  const at::Tensor groups = columns.to(at::kDouble).view({x.size(1), -1, 16});
  return groups.matmul(hadamard_matrix().t()).flatten(1).to(x.scalar_type());
}

// Values of few bits, so that 16 of them have an exact sum in fp32.
at::Tensor few_bits(int64_t rows, int64_t cols, at::ScalarType dtype) {
  const at::Tensor sizes = at::pow(2., at::randint(-3, 4, {1, cols}));
  return at::randint(-127, 128, {rows, cols}).mul(sizes).to(dtype);
}

bool same_image(const RowImage& got, const Quantized& expected) {
  return at::equal(got.image.operand().cpu(), expected.image.cpu()) &&
         at::equal(got.grid.operand().cpu(), expected.grid.cpu().flatten());
}

Layout whole(const Format& format, int64_t rows, int64_t cols) {
  return whole_layout(format, rows, cols);
}

TEST(TransposedValues, EqualTheNaiveOnes) {
  at::manual_seed(0);
  for (const at::Device device : devices()) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const auto& [rows, cols] : kShapes) {
        SCOPED_TRACE(::testing::Message() << device << " " << dtype << rows << "x" << cols);
        const at::Tensor x = few_bits(rows, cols, dtype);
        for (const bool hadamard : {false, true}) {
          const at::Tensor got = transposed_values(x.to(device), hadamard);
          EXPECT_TRUE(at::equal(got.cpu(), naive_columns(x, hadamard))) << hadamard;
        }
      }
    }
  }
}

TEST(TransposedValues, OfStridedAndEmptyValues) {
  const at::Tensor x = at::randn({40, 60}).t();
  EXPECT_TRUE(at::equal(transposed_values(x, false), naive_columns(x, false)));
  EXPECT_EQ(transposed_values(at::zeros({0, 3}), true).sizes(), (at::IntArrayRef{3, 0}));
  EXPECT_EQ(transposed_values(at::zeros({3, 0}), true).sizes(), (at::IntArrayRef{0, 32}));
  TransposeTask task;
  task.rows = 40;
  task.cols = 1;
  for (const int64_t padded : {32, 40}) {
    task.padded_rows = padded;
    EXPECT_THROW(transpose_values(task, {}), c10::Error);
  }
}

class BlockScaledOperand : public ::testing::TestWithParam<const char*> {
 protected:
  const Format& format() const { return find_format(GetParam()); }
};

TEST_P(BlockScaledOperand, ActivationsAreImagesOfTheirRowsAndColumns) {
  at::manual_seed(1);
  const Format& rows_of_blocks = activation_format(format());
  EXPECT_EQ(rows_of_blocks.scale.block_rows, 1);
  EXPECT_EQ(rows_of_blocks.scale.block_cols, format().scale.block_cols);
  EXPECT_EQ(rows_of_blocks.scale.dtype, format().scale.dtype);
  const bool hadamard = format().activations.hadamard_columns;
  for (const at::Device device : devices()) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const auto& [m, k] : kShapes) {
        SCOPED_TRACE(::testing::Message() << device << " " << dtype << m << "x" << k);
        const at::Tensor x = few_bits(m, k, dtype);
        const RowImage rows = quantized_rows(x.to(device), format(), nullptr);
        EXPECT_TRUE(same_image(rows, reference(x, whole(rows_of_blocks, m, k))));
        const RowImage columns = quantized_columns(x.to(device), format(), nullptr);
        EXPECT_EQ(columns.layout.rows, round_up(k, 16));
        EXPECT_EQ(columns.layout.cols, round_up(m, 32));
        EXPECT_TRUE(same_image(columns, reference(naive_columns(x, hadamard), columns.layout)));
      }
    }
  }
}

TEST_P(BlockScaledOperand, GradientsAreRoundedStochastically) {
  at::manual_seed(4);
  const bool hadamard = format().activations.hadamard_columns;
  const Rounding rounding{.key_low = 7, .key_high = 11, .count = 13};
  const at::Tensor x = few_bits(70, 100, at::kBFloat16);
  for (const at::Device device : devices()) {
    const at::Tensor words =
        at::tensor({rounding.key_low, rounding.key_high, rounding.count}, at::kInt).to(device);
    const auto* at_words = words.const_data_ptr<int32_t>();
    const RowImage rows = quantized_rows(x.to(device), format(), at_words);
    EXPECT_TRUE(same_image(rows, reference(x, rows.layout, &rounding)));
    EXPECT_FALSE(same_image(rows, reference(x, rows.layout)));
    const RowImage columns = quantized_columns(x.to(device), format(), at_words);
    EXPECT_TRUE(
        same_image(columns, reference(naive_columns(x, hadamard), columns.layout, &rounding)));
  }
}

TEST_P(BlockScaledOperand, SpecialValuesStayInTheirBlocks) {
  at::Tensor x = at::ones({70, 50});
  x[3][20] = std::numeric_limits<float>::quiet_NaN();
  x[40][49] = std::numeric_limits<float>::infinity();
  x.narrow(0, 64, 6).zero_();
  for (const at::Device device : devices()) {
    const RowImage rows = quantized_rows(x.to(device), format(), nullptr);
    EXPECT_TRUE(same_image(rows, reference(x, rows.layout)));
    // Infinities of one group cancel to NaN.
    const RowImage columns = quantized_columns(x.to(device), format(), nullptr);
    const at::Tensor values = transposed_values(x, format().activations.hadamard_columns);
    EXPECT_TRUE(same_image(columns, reference(values, columns.layout)));
  }
}

TEST_P(BlockScaledOperand, TransposedWeightsAreQuantizedTransposes) {
  at::manual_seed(2);
  if (format().scale.block_rows == 1) GTEST_SKIP() << "no square blocks";
  for (const at::Device device : devices()) {
    for (const auto& [n, k] : kShapes) {
      SCOPED_TRACE(::testing::Message() << device << " " << n << "x" << k);
      at::Tensor values = random_values(n, k, at::kFloat);
      if (n % 3 == 0) values[n / 2][k / 2] = std::numeric_limits<float>::quiet_NaN();
      const Quantized q = quantized(values.to(device), whole(format(), n, k));
      const QuantizedMatrix weight = matrix_of({whole(format(), n, k), q.image, q.grid}, n);
      const RowImage rows = weight_rows(weight);
      EXPECT_EQ(rows.image.const_data_ptr(), q.image.const_data_ptr());
      EXPECT_TRUE(same_image(rows, q));
      const RowImage columns = weight_columns(weight);
      EXPECT_EQ(columns.layout.rows, round_up(k, 16));
      const at::Tensor transposed =
          at::constant_pad_nd(values.t(), {0, 0, 0, round_up(k, 16) - k}).contiguous();
      EXPECT_TRUE(same_image(columns, quantized(transposed.to(device), columns.layout)));
    }
  }
}

TEST_P(BlockScaledOperand, WindowsOfWeightsAreMatricesOfTheirOwn) {
  at::manual_seed(3);
  for (const at::Device device : devices()) {
    const at::Tensor values = random_values(256, 80, at::kFloat);
    Layout layout = whole(format(), 256, 80);
    layout.matrix_rows = 64;
    const Quantized q = quantized(values.to(device), layout);
    for (const int64_t first : {0, 64, 192, 96}) {
      SCOPED_TRACE(::testing::Message() << device << " from row " << first);
      const QuantizedMatrix window =
          matrix_of({layout, q.image, q.grid, first}, first % 64 ? 32 : 64);
      const RowImage rows = weight_rows(window);
      const auto read = [&](const RowImage& image) {
        return dequantized({{}, image.grid.operand(), image.image.operand().contiguous()},
                           image.layout, at::kFloat, 0, image.layout.logical_rows)
            .cpu();
      };
      const at::Tensor expected = dequantized(q, layout, at::kFloat, first, window.rows).cpu();
      EXPECT_TRUE(same_values(read(rows), expected));
      if (format().scale.block_rows == 1) continue;
      EXPECT_TRUE(same_values(read(weight_columns(window)), expected.t()));
    }
  }
}

// A forward may have gathered the rowwise image alone.
TEST(WeightRows, OfOneImageOfTwoHaveItsRowBytes) {
  at::manual_seed(4);
  const Layout both = whole(find_format("mxfp8_1x32"), 64, 80);
  Layout rowwise = both;
  rowwise.images = Images::kRowwise;
  for (const at::Device device : devices()) {
    const Quantized q = quantized(random_values(64, 80, at::kFloat).to(device), both);
    const at::Tensor image =
        q.image.view({64, both.row_bytes()}).narrow(1, 0, rowwise.row_bytes()).contiguous();
    for (const auto& [layout, bytes] :
         {std::pair{both, q.image.view({64, -1})}, {rowwise, image}}) {
      const RowImage rows = weight_rows(matrix_of({layout, bytes, q.grid, 32}, 32));
      EXPECT_EQ(rows.layout.row_bytes(), rows.image.operand().stride(0));
      const Quantized read{{}, rows.grid.operand(), rows.image.operand()};
      EXPECT_TRUE(same_values(dequantized(read, rows.layout, at::kFloat, 0, 32),
                              dequantized(q, both, at::kFloat, 32, 32)));
    }
  }
}

TEST_P(BlockScaledOperand, ImagesWithoutATransposeAreNamed) {
  TransposeImageTask task;
  task.layout = whole(format(), 64, 64);
  const auto refuses = [&] { EXPECT_THROW(transpose_image(task, {}), c10::Error); };
  if (format().scale.block_rows == 1) return refuses();
  task.layout.rows = 32;
  refuses();
  task.layout = whole(find_format("float8_blockwise"), 128, 128);
  refuses();
}

INSTANTIATE_TEST_SUITE_P(All, BlockScaledOperand, ::testing::Values("mxfp8", "nvfp4", "nvfp4_1x16"),
                         [](const auto& param) { return std::string(param.param); });

TEST(ActivationFormat, NeedsRowScales) {
  EXPECT_THROW(activation_format(find_format("float8_delayed")), std::invalid_argument);
}

}  // namespace
}  // namespace qshard::testing
