// Row images and grids, on every device there is, against the slow reference.
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

class Quantize : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {
 protected:
  Layout layout_of(const Shape& s) const {
    return fitted({&find_format(std::get<0>(GetParam())), s.rows, s.cols, s.logical_rows,
                   s.matrix_rows, s.row_offset});
  }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }

  // Compares everything; `values` are on the CPU.
  void check(const at::Tensor& values, const Layout& layout) {
    const Quantized expected = reference(values, layout);
    for (const at::Device device : devices()) {
      SCOPED_TRACE(device.str());
      const Quantized q = quantized(values.to(device), layout);
      ASSERT_TRUE(same_values(q.amax, expected.amax));
      ASSERT_TRUE(at::equal(q.grid.cpu(), expected.grid));
      ASSERT_TRUE(at::equal(q.image.cpu(), expected.image));
      const Quantized at_once = quantized_at_once(values.to(device), layout);
      ASSERT_TRUE(same_values(at_once.amax, expected.amax));
      ASSERT_TRUE(at::equal(at_once.grid.cpu(), expected.grid));
      ASSERT_TRUE(at::equal(at_once.image.cpu(), expected.image));
    }
  }
};

TEST_P(Quantize, EqualsTheReference) {
  at::manual_seed(0);
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(::testing::Message() << shape.rows << "x" << shape.cols << " of "
                                      << shape.logical_rows << " at " << shape.row_offset);
    check(random_values(shape.rows, shape.cols, dtype()), layout_of(shape));
  }
}

TEST_P(Quantize, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float specials[] = {inf, -inf, nan, -nan, 0.f, -0.f, 1e-45f, -1e-45f, 3e38f, 448.f, 6e-8f};
  const Layout layout = layout_of({140, 144, 140, 140, 0});
  for (const float special : specials) {
    SCOPED_TRACE(special);
    for (const float rest : {0.f, 1.f, 1e-40f}) {
      at::Tensor values = at::full({140, 144}, rest).to(dtype());
      values[3][5] = special;
      values[139][143] = special;
      check(values, layout);
    }
  }
}

// The codes of amaxes at a power of two and one ulp to both sides.
TEST_P(Quantize, AmaxAroundPowersOfTwo) {
  const Layout layout = layout_of({1, 16, 1, 1, 0});
  for (int exponent = -20; exponent <= 14; ++exponent) {
    for (const float base : {1.f, 1.75f}) {
      const float x = std::ldexp(base, exponent);
      for (const float amax : {x, std::nextafter(x, 0.f), std::nextafter(x, 1e30f)}) {
        const at::Tensor fractions = at::arange(16).to(at::kFloat).div(15.);
        check((fractions * amax).view({1, 16}).to(dtype()), layout);
      }
    }
  }
}

// Any cut into shards gives the rows of the whole, once the shards agree on the amaxes.
TEST_P(Quantize, ShardsEqualTheWhole) {
  at::manual_seed(1);
  // Blocks whose scales are not in the grid can be cut in one matrix only.
  const bool in_grid = layout_of({}).format->scale.is_in_grid();
  const int64_t total = layout_of({700, 150, 700, 700, 0}).logical_rows;
  const int64_t matrix_rows = in_grid ? total / 2 : total;
  const Layout whole = layout_of({total, 150, total, matrix_rows, 0});
  const at::Tensor values = random_values(total, 150, dtype());
  const Quantized expected = quantized(values, whole);
  for (const int64_t ranks : {2, 3, 7, 11}) {
    const int64_t rows = ceil_div(total, ranks);
    std::vector<at::Tensor> padded, amaxes;
    std::vector<Layout> layouts;
    std::vector<BoundaryBlocks> boundaries;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      at::Tensor shard = at::full({rows, 150}, 1e6).to(dtype());  // padding must not count
      const int64_t live = std::min(rows, total - rank * rows);
      shard.narrow(0, 0, live).copy_(values.narrow(0, rank * rows, live));
      padded.push_back(shard);
      layouts.push_back(layout_of({rows, 150, total, matrix_rows, rank * rows}));
      boundaries.push_back(find_boundary_blocks(layouts.back(), ranks));
      amaxes.push_back(amax_of(shard, layouts.back(), boundaries.back()));
    }
    const at::Tensor agreed = agree(amaxes);
    ASSERT_TRUE(at::equal(agreed.narrow(0, 0, whole.grid_numel()), expected.amax));
    for (const at::Device device : devices()) {
      std::vector<at::Tensor> images;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const Quantized q =
            quantized(padded[rank].to(device), layouts[rank], agreed.to(device), boundaries[rank]);
        ASSERT_TRUE(at::equal(q.grid.cpu(), expected.grid));
        images.push_back(q.image.cpu());
      }
      const at::Tensor gathered = at::cat(images);
      EXPECT_TRUE(at::equal(gathered.narrow(0, 0, total), expected.image));
      EXPECT_EQ(gathered.narrow(0, total, gathered.size(0) - total).count_nonzero().item<int64_t>(),
                0);
    }
  }
}

TEST_P(Quantize, DequantizesWindows) {
  at::manual_seed(2);
  for (const Shape& shape : kShapes) {
    const Layout layout = layout_of(shape);
    at::Tensor values = random_values(shape.rows, shape.cols, dtype());
    if (values.numel() > 8) values.view(-1)[7] = std::numeric_limits<float>::quiet_NaN();
    Quantized q = quantized(values, layout);
    const at::Tensor expected = reference_values(q, layout);
    for (const at::Device device : devices()) {
      const Quantized there{q.amax, q.grid.to(device), q.image.to(device)};
      for (const int64_t first : {int64_t{0}, shape.rows / 3}) {
        const int64_t rows = shape.rows - first - shape.rows / 5;
        const at::Tensor got = dequantized(there, layout, dtype(), first, rows);
        EXPECT_TRUE(same_values(got, expected.to(dtype()).narrow(0, first, rows)))
            << device << " " << shape.rows << "x" << shape.cols << " rows " << first;
      }
    }
  }
}

// More tasks than one CUDA launch holds, of mixed types.
TEST_P(Quantize, ManyTensorsAtOnce) {
  at::manual_seed(3);
  for (const at::Device device : devices()) {
    std::vector<at::Tensor> values;
    std::vector<Quantized> results;
    std::vector<QuantizeTask> tasks;
    for (int64_t i = 0; i < 75; ++i) {
      const Layout layout = layout_of({i * 5 % 140, 1 + i * 7 % 300, i * 5 % 140, i * 5 % 140, 0});
      values.push_back(random_values(layout.rows, layout.cols, kDtypes[i % 3]).to(device));
      results.push_back(outputs_for(values.back(), layout));
      tasks.push_back(task_of(values.back(), layout, {}, results.back()));
    }
    compute_amax(tasks, stream_of(device));
    quantize(tasks, stream_of(device));
    for (size_t i = 0; i < tasks.size(); ++i) {
      const Quantized expected = reference(values[i], tasks[i].layout);
      EXPECT_TRUE(at::equal(results[i].amax.cpu(), expected.amax)) << device << i;
      EXPECT_TRUE(at::equal(results[i].grid.cpu(), expected.grid)) << device << i;
      EXPECT_TRUE(at::equal(results[i].image.cpu(), expected.image)) << device << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Quantize, all_kernels(), kernel_name);

#ifndef QSHARD_WITH_CUDA
TEST(QuantizeWithoutCuda, SaysSo) {
  QuantizeTask task;
  task.layout.format = &find_format("float8_tensorwise");
  EXPECT_THROW(quantize({&task, 1}, {true, nullptr}), c10::Error);
}
#endif

}  // namespace
}  // namespace qshard::testing
