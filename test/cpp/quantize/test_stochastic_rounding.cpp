// Stochastic rounding: scalar codes, and whole row images on every device, against the definition.
#include <ATen/Parallel.h>

#include "kernels/numerics/row_scales.h"
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr Rounding kRounding{0x12345678, 0x7abcdef0, 41};

// -------------------------------------------------------------------------------------- scalars

struct Encoder {
  DType dtype;
  uint8_t (*nearest)(float);
  uint8_t (*stochastic)(float, uint32_t);
};

const Encoder kEncoders[] = {
    {DType::kFloat8E4M3, encode_e4m3, encode_e4m3_stochastic},
    {DType::kFloat8E5M2, encode_e5m2, encode_e5m2_stochastic},
    {DType::kFloat4E2M1, encode_e2m1, encode_e2m1_stochastic},
};

// Random123's known answers: the engine is Philox 4x32-10, and its arguments are the words of the
// key and of the counter that kernels/numerics/random_words.h says.
TEST(StochasticRounding, TorchsEngineGivesTheKnownAnswers) {
  const struct {
    uint64_t key, counter_high, counter_low;
    uint32_t words[4];
  } cases[] = {
      {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {~0ull, ~0ull, ~0ull, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {0x299f31d0a4093822,
       0x0370734413198a2e,
       0x85a308d3243f6a88,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const auto& c : cases) {
    at::philox_engine words(c.key, c.counter_high, c.counter_low);
    for (const uint32_t word : c.words) EXPECT_EQ(words(), word);
  }
}

TEST(StochasticRounding, CodesFollowTheirDefinition) {
  at::philox_engine random(7);
  for (const Encoder& encoder : kEncoders) {
    for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 8191) {
      const float x = bits_float(static_cast<uint32_t>(bits));
      for (const uint32_t word : {0u, 0xffu, 0x100u, 0xffffffffu, random(), random()}) {
        ASSERT_EQ(encoder.stochastic(x, word), reference_stochastic_code(encoder.dtype, x, word))
            << x << " " << word;
      }
    }
  }
}

// Between every two codes, at distances of every size, the draws just below and at the distance.
TEST(StochasticRounding, GoesUpWhereTheDrawIsBelowTheDistance) {
  for (const Encoder& encoder : kEncoders) {
    const std::vector<float>& values = code_values(encoder.dtype);
    for (size_t lower = 0; lower + 1 < values.size(); ++lower) {
      const float ulp = values[lower + 1] - values[lower];
      for (const float distance : {0x1p-24f, 3 * 0x1p-20f, 0x1p-10f, 0.25f, 0.5f, 0.8125f}) {
        const float x = values[lower] + ulp * distance;
        const double exact = (static_cast<double>(x) - values[lower]) / ulp;
        const auto draws = static_cast<uint32_t>(std::ceil(exact * 0x1p24));
        if (draws > 0) {
          EXPECT_EQ(encoder.stochastic(x, (draws << 8) - 1), lower + 1) << x;
        }
        EXPECT_EQ(encoder.stochastic(x, draws << 8), lower) << x;
      }
    }
  }
}

TEST(StochasticRounding, CodesThemselvesStay) {
  for (const Encoder& encoder : kEncoders) {
    for (const float value : code_values(encoder.dtype)) {
      for (const uint32_t word : {0u, 0x80000000u, 0xffffffffu}) {
        EXPECT_EQ(encoder.stochastic(value, word), encoder.nearest(value));
        EXPECT_EQ(encoder.stochastic(-value, word), encoder.nearest(-value));
      }
    }
  }
}

TEST(StochasticRounding, SpecialsAreThoseOfNearest) {
  for (const Encoder& encoder : kEncoders) {
    const float max = code_values(encoder.dtype).back();
    for (const float x : {0.f, max, std::nextafter(max, kInf), max * 1.05f, max * 2, 3e38f, kInf,
                          kNaN, bits_float(0x7f800001u), bits_float(0x7fffffffu)}) {
      for (const uint32_t word : {0u, 0xffffffffu}) {
        EXPECT_EQ(encoder.stochastic(x, word), encoder.nearest(x)) << x;
        EXPECT_EQ(encoder.stochastic(-x, word), encoder.nearest(-x)) << x;
      }
    }
  }
}

// -------------------------------------------------------------------------------------- kernels

class StochasticRows : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {
 protected:
  const Format& format() const { return find_format(std::get<0>(GetParam())); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  Layout layout_of(const Shape& s) const {
    return fitted({&format(), s.rows, s.cols, s.logical_rows, s.matrix_rows, s.row_offset});
  }
  Layout whole(int64_t rows, int64_t cols) const {
    return fitted({&format(), rows, cols, rows, rows, 0});
  }

  // Compares everything; `values` are on the CPU.
  void check(const at::Tensor& values, const Layout& layout, const Rounding& rounding) const {
    const Quantized expected = reference(values, layout, &rounding);
    for (const at::Device device : devices()) {
      SCOPED_TRACE(device.str());
      const Quantized q = rounded(values.to(device), layout, rounding);
      ASSERT_TRUE(same_values(q.amax, expected.amax));
      ASSERT_TRUE(at::equal(q.grid.cpu(), expected.grid));
      ASSERT_TRUE(at::equal(q.image.cpu(), expected.image));
    }
  }

  static at::Tensor words_of(const Rounding& rounding, at::Device device) {
    return at::tensor({rounding.key_low, rounding.key_high, rounding.count}, at::kInt).to(device);
  }

  // The image on the device of `values`.
  static Quantized rounded(const at::Tensor& values, const Layout& layout,
                           const Rounding& rounding) {
    Quantized out = outputs_for(values, layout);
    out.amax = amax_of(values, layout);
    const at::Tensor words = words_of(rounding, values.device());
    QuantizeTask task = task_of(values, layout, {}, out);
    task.rounding = words.const_data_ptr<int32_t>();
    quantize({&task, 1}, stream_of(values.device()));
    return out;
  }
};

TEST_P(StochasticRows, EqualTheReference) {
  at::manual_seed(0);
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(::testing::Message() << shape.rows << "x" << shape.cols << " of "
                                      << shape.logical_rows << " at " << shape.row_offset);
    const at::Tensor values = random_values(shape.rows, shape.cols, dtype());
    for (const Rounding& rounding :
         {kRounding, Rounding{0, 0, 0}, Rounding{0x7fffffff, 0x7fffffff, 0x7fffffff}}) {
      check(values, layout_of(shape), rounding);
    }
  }
}

TEST_P(StochasticRows, SpecialValues) {
  const Layout layout = whole(140, 144);
  for (const float special : {kInf, -kInf, kNaN, -kNaN, -0.f, 1e-45f, -1e-45f, 3e38f, 6e-8f}) {
    SCOPED_TRACE(special);
    for (const float rest : {0.f, -0.3f, 1e-40f}) {
      at::Tensor values = at::full({140, 144}, rest).to(dtype());
      values[3][5] = special;
      values[139][143] = special;
      check(values, layout, kRounding);
    }
  }
}

// Every remainder of the index modulo 4, at the beginning of rows and of memory.
TEST_P(StochasticRows, RaggedRowsAndUnalignedValues) {
  at::manual_seed(1);
  for (int64_t cols = 1; cols < 40; cols += cols < 20 ? 1 : 5) {
    check(random_values(35, cols, dtype()), whole(35, cols), kRounding);
  }
  const at::Tensor values = random_values(1, 1 + 20 * 48, dtype());
  const Layout layout = whole(20, 48);
  for (const at::Device device : devices()) {
    const at::Tensor odd = values.to(device).view(-1).narrow(0, 1, 20 * 48).view({20, 48});
    const Quantized q = rounded(odd, layout, kRounding);
    EXPECT_TRUE(at::equal(q.image.cpu(), reference(odd, layout, &kRounding).image)) << device;
  }
}

// All ranks' shards in one call, beside a task that is rounded to nearest and one with another key.
TEST_P(StochasticRows, ShardsEqualTheWhole) {
  at::manual_seed(2);
  const Rounding other{5, 0, 1};
  const int64_t rows = whole(300, 150).matrix_rows;
  const at::Tensor values = random_values(rows, 150, dtype());
  const Quantized expected = reference(values, whole(rows, 150), &kRounding);
  const at::Tensor more = random_values(40, 33, dtype());
  for (const int64_t ranks : {1, 2, 7, 40}) {
    for (const at::Device device : devices()) {
      const int64_t chunk = ceil_div(rows, ranks);
      const at::Tensor key = words_of(kRounding, device), other_key = words_of(other, device);
      std::vector<at::Tensor> shards, amaxes;
      std::vector<Quantized> results;
      std::vector<QuantizeTask> tasks;
      const auto add = [&](const at::Tensor& shard, const Layout& layout,
                           const BoundaryBlocks& boundary, const int32_t* rounding) {
        shards.push_back(shard.to(device));
        results.push_back(outputs_for(shards.back(), layout, boundary));
        tasks.push_back(task_of(shards.back(), layout, boundary, results.back()));
        tasks.back().rounding = rounding;
      };
      for (int64_t rank = 0; rank < ranks; ++rank) {
        at::Tensor shard = at::full({chunk, 150}, 1e6).to(dtype());  // padding must not count
        const int64_t first = std::min<int64_t>(rows, rank * chunk);
        const int64_t live = std::min(chunk, rows - first);
        shard.narrow(0, 0, live).copy_(values.narrow(0, first, live));
        const Layout layout{&format(), chunk, 150, rows, rows, rank * chunk};
        add(shard, layout, find_boundary_blocks(layout, ranks), key.const_data_ptr<int32_t>());
        amaxes.push_back(results.back().amax);
      }
      add(more, whole(40, 33), {}, nullptr);
      add(more, whole(40, 33), {}, other_key.const_data_ptr<int32_t>());
      compute_amax(tasks, stream_of(device));
      const at::Tensor agreed = agree(amaxes);
      for (const at::Tensor& amax : amaxes) amax.copy_(agreed);
      quantize(tasks, stream_of(device));

      std::vector<at::Tensor> images;
      for (int64_t rank = 0; rank < ranks; ++rank) images.push_back(results[rank].image.cpu());
      const at::Tensor gathered = at::cat(images);
      EXPECT_TRUE(at::equal(gathered.narrow(0, 0, rows), expected.image)) << ranks << device;
      EXPECT_EQ(gathered.narrow(0, rows, gathered.size(0) - rows).count_nonzero().item<int64_t>(),
                0);
      const Quantized nearest = reference(more, whole(40, 33));
      EXPECT_TRUE(at::equal(results[ranks].image.cpu(), nearest.image)) << device;
      const Quantized last = reference(more, whole(40, 33), &other);
      EXPECT_TRUE(at::equal(results[ranks + 1].image.cpu(), last.image)) << device;
    }
  }
}

// Elements whose counter needs its second word.
TEST_P(StochasticRows, FarDownALargeTensor) {
  at::manual_seed(3);
  for (const int64_t cols : {65540, 65537}) {
    const int64_t offset = (1 << 18) + 128;
    const Layout far = fitted({&format(), 3, cols, offset + 3, offset + 3, offset});
    const Layout near = whole(3, cols);  // begins with a block, too
    const at::Tensor values = random_values(3, cols, dtype());
    Rounding shifted = kRounding;
    shifted.first = offset * cols;
    const Quantized expected = reference(values, near, &shifted);
    for (const at::Device device : devices()) {
      const Quantized q = rounded(values.to(device), far, kRounding);
      EXPECT_TRUE(at::equal(q.image.cpu(), expected.image)) << device;
    }
  }
}

TEST_P(StochasticRows, ThreadsDoNotMatter) {
  at::manual_seed(4);
  const at::Tensor values = random_values(700, 129, dtype());
  const Layout layout = whole(700, 129);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const Quantized alone = rounded(values, layout, kRounding);
  at::set_num_threads(4);
  const Quantized together = rounded(values, layout, kRounding);
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(alone.image, together.image));
}

TEST_P(StochasticRows, EveryPartOfKeyAndCountMatters) {
  at::manual_seed(5);
  const at::Tensor values = at::rand({16, 64}).to(dtype());
  const Layout layout = whole(16, 64);
  const at::Tensor image = rounded(values, layout, kRounding).image;
  EXPECT_TRUE(at::equal(rounded(values, layout, kRounding).image, image));
  for (int part = 0; part < 3; ++part) {
    Rounding other = kRounding;
    (part == 0 ? other.key_low : part == 1 ? other.key_high : other.count) ^= 1;
    EXPECT_GT(rounded(values, layout, other).image.ne(image).sum().item<int64_t>(), 100) << part;
  }
}

// One draw's error has a standard deviation of at most half an ulp: the mean of N draws has at most
// ulp / (2 sqrt(N)), here for every element, and for all of them together.
TEST_P(StochasticRows, MeanErrorTendsToZero) {
  constexpr int kDraws = 1000;
  at::manual_seed(6);
  const at::Tensor values = random_values(16, 48, dtype());
  const Layout layout = whole(16, 48);
  const Quantized nearest = reference(values, layout);
  // Codes of 1 read as scale_inv.
  Quantized ones = nearest;
  ones.image = nearest.image.clone();
  ones.image.narrow(1, 0, layout.code_bytes()).fill_(format().code_bits == 8 ? 0x38 : 0x22);
  const at::Tensor scale_inv = reference_values(ones, layout).to(at::kDouble);

  at::Tensor sum = at::zeros({16, 48}, at::kDouble);
  for (int draw = 0; draw < kDraws; ++draw) {
    const Quantized q = rounded(values, layout, {kRounding.key_low, kRounding.key_high, draw});
    sum += reference_values(q, layout);
  }
  const at::Tensor in_codes = values.to(at::kDouble) / scale_inv;
  const at::Tensor error = (sum / kDraws - values.to(at::kDouble)) / scale_inv;
  const std::vector<float>& table = code_values(format().code_dtype);
  double total = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < values.numel(); ++i) {
    const auto x = static_cast<float>(in_codes.view(-1)[i].item<double>());
    const size_t lower = code_below(table, x);
    if (lower + 1 == table.size()) continue;  // saturates
    const double in_ulps =
        error.view(-1)[i].item<double>() / (table[lower + 1] - table[lower]) * (x < 0 ? -1 : 1);
    EXPECT_LE(std::fabs(in_ulps), 5 / (2 * std::sqrt(kDraws))) << x;
    total += in_ulps;
    ++count;
  }
  ASSERT_GT(count, 600);
  const auto n = static_cast<double>(count);
  EXPECT_LE(std::fabs(total / n), 5 / (2 * std::sqrt(kDraws * n)));
}

INSTANTIATE_TEST_SUITE_P(All, StochasticRows, all_kernels(), kernel_name);

}  // namespace
}  // namespace qshard::testing
