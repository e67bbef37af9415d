// Formats with a second, columnwise row image: where its bytes lie, what they are read as.
#include "kernel_cases.h"

namespace qshard::testing {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

Layout layout_of(int64_t rows, int64_t cols, int64_t matrix_rows, int64_t row_offset = 0) {
  const int64_t logical_rows = round_up(row_offset + rows, matrix_rows);
  return {&find_format("mxfp8_1x32"), rows, cols, logical_rows, matrix_rows, row_offset};
}

Quantized on(const Quantized& q, at::Device device) {
  return {q.amax.to(device), q.grid.to(device), q.image.to(device)};
}

TEST(TwoRowImages, AColumnOfABlockIsARowOfItsTranspose) {
  at::manual_seed(0);
  for (const at::ScalarType dtype : kDtypes) {
    for (const int64_t cols : {32, 64, 160}) {
      const at::Tensor values = random_values(96, cols, dtype);
      for (const at::Device device : devices()) {
        const Layout layout = layout_of(96, cols, 96);
        const Layout transposed = layout_of(cols, 96, cols);
        const Quantized q = quantized(values.to(device), layout);
        const Quantized of_transpose = quantized(values.t().contiguous().to(device), transposed);
        EXPECT_TRUE(same_values(dequantized(q, layout, dtype, 0, 96, /*columnwise=*/true),
                                dequantized(of_transpose, transposed, dtype, 0, cols).t()));
        EXPECT_TRUE(same_values(
            dequantized(q, layout, dtype, 0, 96),
            dequantized(of_transpose, transposed, dtype, 0, cols, /*columnwise=*/true).t()));
      }
    }
  }
}

TEST(TwoRowImages, WindowsOfTheColumnwiseImage) {
  at::manual_seed(1);
  for (const int64_t cols : {1, 33, 70, 129, 1030}) {
    at::Tensor values = random_values(3 * 64, cols, at::kFloat);
    values[70][0] = std::nanf("");
    const Layout layout = layout_of(3 * 64, cols, 64);
    const Quantized here = quantized(values, layout);
    const at::Tensor whole = dequantized(here, layout, at::kFloat, 0, layout.rows, true);
    EXPECT_TRUE(whole.narrow(0, 64, 32).select(1, 0).isnan().all().item<bool>());
    EXPECT_EQ(whole.isnan().sum().item<int64_t>(), 32);
    for (const at::Device device : devices()) {
      const Quantized q = on(here, device);
      for (const auto& [first, rows] : {std::pair{0, 192}, {5, 20}, {31, 2}, {64, 64}, {100, 92}}) {
        for (const at::ScalarType dtype : kDtypes) {
          EXPECT_TRUE(same_values(dequantized(q, layout, dtype, first, rows, true),
                                  whole.narrow(0, first, rows).to(dtype)))
              << device << first;
        }
      }
    }
  }
}

TEST(TwoRowImages, OneOfThemIsReadWhereItIsAlone) {
  at::manual_seed(2);
  const Layout layout = layout_of(64, 50, 64);
  const Quantized both = quantized(random_values(64, 50, at::kFloat), layout);
  const int64_t bytes = layout.image_row_bytes();
  for (const bool columnwise : {false, true}) {
    Layout half = layout;
    half.images = columnwise ? Images::kColumnwise : Images::kRowwise;
    ASSERT_EQ(half.row_bytes(), bytes);
    const auto image = both.image.narrow(1, columnwise ? bytes : 0, bytes).contiguous();
    for (const at::Device device : devices()) {
      const Quantized q = on({both.amax, both.grid, image}, device);
      EXPECT_TRUE(same_values(dequantized(q, half, at::kFloat, 0, 64, columnwise),
                              dequantized(both, layout, at::kFloat, 0, 64, columnwise)));
      EXPECT_THROW(dequantized(q, half, at::kFloat, 0, 64, !columnwise), c10::Error);
    }
  }
}

TEST(TwoRowImages, BlocksWithoutAllTheirRowsAreAnError) {
  const Layout layout = layout_of(44, 50, 32, 20);
  const Quantized q = quantized(at::ones({44, 50}), layout);
  EXPECT_THROW(dequantized(q, layout, at::kFloat, 0, 5, true), c10::Error);
  EXPECT_THROW(dequantized(q, layout, at::kFloat, 0, 44, true), c10::Error);
  const at::Tensor inner = dequantized(q, layout, at::kFloat, 12, 28, true);  // rows 32 to 59
  EXPECT_TRUE(same_values(inner, at::ones({28, 50})));
}

}  // namespace
}  // namespace qshard::testing
