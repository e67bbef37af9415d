// Formats with a second, columnwise row image: what is written, where its bytes lie, what they are
// read as.
#include "test/cpp/cases/kernel_cases.h"

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

// Both images of a whole tensor, made at once from values that begin `skipped` elements after an
// aligned address.
void expect_reference(const at::Tensor& values, int64_t matrix_rows, int64_t skipped = 0) {
  const Layout layout = layout_of(values.size(0), values.size(1), matrix_rows);
  const Quantized expected = reference(values, layout);
  for (const at::Device device : devices()) {
    at::Tensor memory = at::zeros({skipped + values.numel()}, values.options().device(device));
    const at::Tensor here = memory.narrow(0, skipped, values.numel()).view(values.sizes());
    here.copy_(values);
    EXPECT_TRUE(at::equal(quantized(here, layout).image.cpu(), expected.image))
        << device << ", " << values.sizes() << " " << values.scalar_type();
  }
}

TEST(TwoRowImages, RaggedColumns) {
  at::manual_seed(3);
  for (const at::ScalarType dtype : kDtypes) {
    for (const int64_t cols :
         {1, 4, 31, 32, 33, 120, 127, 128, 129, 136, 255, 256, 257, 264, 1030}) {
      expect_reference(random_values(96, cols, dtype), 96);
    }
    expect_reference(random_values(3 * 64, 200, dtype), 64);
  }
}

TEST(TwoRowImages, UnalignedValues) {
  at::manual_seed(4);
  for (const at::ScalarType dtype : kDtypes) {
    for (const int64_t cols : {64, 130, 264, 301}) {
      for (const int64_t skipped : {1, 2, 3}) {
        expect_reference(random_values(64, cols, dtype), 64, skipped);
      }
    }
  }
}

// Blocks of rows and of columns that hold one such value, all of them, or none.
TEST(TwoRowImages, SpecialValues) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float nan = std::nanf("");
  for (const at::ScalarType dtype : kDtypes) {
    for (const float rest : {0.f, -0.3f, 1e-40f}) {
      at::Tensor values = at::full({96, 291}, rest).to(dtype);
      int64_t at = 0;
      for (const float x : {nan, -nan, kInf, -kInf, 0.f, -0.f, 3e38f, 1e-45f, 60000.f}) {
        values[at % 96][at % 291] = x;
        values[(at + 40) % 96].narrow(0, at % 291, 1).fill_(-x);
        at += 31;
      }
      values.narrow(0, 32, 32).select(1, 200).fill_(nan);
      values.select(0, 95).narrow(0, 256, 32).fill_(-nan);
      values.narrow(0, 0, 32).narrow(1, 288, 3).fill_(kInf);
      expect_reference(values, 96);
    }
  }
}

// Shards whose first and last blocks of rows are cut, or that have one block row, cut at both ends;
// more of them than go into one launch.
TEST(TwoRowImages, CutBlocksAreOfAllRanks) {
  at::manual_seed(5);
  const int64_t rows = 320;
  for (const at::ScalarType dtype : kDtypes) {
    for (const auto& [cols, ranks] : {std::pair{264, 3}, {291, 7}, {520, 23}, {70, 320}}) {
      const at::Tensor values = random_values(rows, cols, dtype);
      const Quantized expected = reference(values, layout_of(rows, cols, rows));
      for (const at::Device device : devices()) {
        std::vector<at::Tensor> images;
        for (const Quantized& q : quantized_shards(values, layout_of(rows, cols, rows),
                                                   ceil_div(rows, ranks), ranks, device, 6e4)) {
          images.push_back(q.image.cpu());
        }
        const at::Tensor gathered = at::cat(images);
        EXPECT_TRUE(at::equal(gathered.narrow(0, 0, rows), expected.image)) << device << ranks;
        const at::Tensor padding = gathered.narrow(0, rows, gathered.size(0) - rows);
        EXPECT_EQ(padding.count_nonzero().item<int64_t>(), 0) << device << ranks;
      }
    }
  }
}

TEST(TwoRowImages, OneOfThemIsWrittenWhereItIsAlone) {
  at::manual_seed(6);
  for (const at::ScalarType dtype : kDtypes) {
    for (const int64_t cols : {50, 272}) {
      const Layout layout = layout_of(44, cols, 64, 20);
      const at::Tensor values = random_values(44, cols, dtype);
      const at::Tensor both = quantized(values, layout).image;
      for (const bool columnwise : {false, true}) {
        Layout half = layout;
        half.images = columnwise ? Images::kColumnwise : Images::kRowwise;
        const int64_t bytes = layout.image_row_bytes();
        for (const at::Device device : devices()) {
          EXPECT_TRUE(at::equal(quantized(values.to(device), half).image.cpu(),
                                both.narrow(1, columnwise ? bytes : 0, bytes)))
              << device << columnwise;
        }
      }
    }
  }
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
