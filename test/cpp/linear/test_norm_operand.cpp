// Codes of normalized rows: those of the values, which the normalization leaves in memory.
#include <ATen/ops/layer_norm.h>
#include <c10/util/Exception.h>

#include "kernels/linear/linear_amax.h"
#include "kernels/linear/norm_operand.h"
#include "test/cpp/cases/gemm_cases.h"
#include "test/cpp/cases/packed_cases.h"

namespace qshard::testing {
namespace {

struct Size {
  int64_t rows, cols;
};
// Parts of a block, blocks, several CUDA blocks of rows, more rows than are taken at once, rows of
// parts of a warp, the longest row.
constexpr Size kSizes[] = {{1, 8},     {129, 8},    {1, 4104},   {127, 96},
                           {129, 136}, {300, 4104}, {4097, 96},  {129, 4096},
                           {513, 200}, {200, 1024}, {1700, 520}, {140, kMaxNormBytes / 2}};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
constexpr Orientations kAsked[] = {{true, false}, {true, true}, {false, true}};

// `odd`: with what no activation should have, and rows of nothing else.
at::Tensor with_odd(at::Tensor x) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr float kOdd[] = {kInf, -kInf, kNaN, -kNaN, 0.f, -0.f, 1e-30f};
  for (int64_t i = 0; i < 7; ++i) {
    const int64_t row = 17 * i + 3;
    if (row >= x.size(0)) break;
    x[row][x.size(1) - 1 - i].fill_(kOdd[i]);
    if (i >= 4) x[row].fill_(kOdd[i]);
  }
  return x;
}

/// Calls run(Case) for normalizations of x of which every two options meet.
template <typename Run>
void for_norms(const at::Tensor& x, const Run& run) {
  const at::Tensor weight = at::randn({x.size(1)}), bias = at::randn({x.size(1)});
  for (const bool rms : {true, false}) {
    for (const bool zero_centered : {false, true}) {
      const at::ScalarType dtype = rms == zero_centered ? at::kBFloat16 : at::kFloat;
      SCOPED_TRACE(::testing::Message()
                   << (rms ? "RMSNorm" : "LayerNorm") << (zero_centered ? " zero centered" : "")
                   << " by " << c10::toString(dtype));
      Normalization norm{.weight = weight.to(x.device(), dtype)};
      // RMSNorm has none in our modules; its kernel takes one.
      if (!rms || zero_centered) norm.bias = bias.to(x.device(), dtype);
      norm.eps = 1e-5f;
      norm.rms = rms;
      norm.zero_centered_gamma = zero_centered;
      run(norm);
    }
  }
}

/// Calls run(x) for values of a dtype and size, or of the longest rows that kernels take.
template <typename Run>
void for_values(const Size& size, at::ScalarType dtype, const Run& run) {
  const auto longest = kMaxNormBytes / static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t cols = std::min(size.cols, longest);
  const at::Tensor drawn =
      at::randn({size.rows, cols}).mul_(at::randn({size.rows, 1}).exp_()).add_(0.5);
  for (const bool odd : {false, true}) {
    SCOPED_TRACE(odd ? "odd" : "");
    const at::Tensor x = drawn.to(gpu(), dtype, false, /*copy=*/true);
    run(odd ? with_odd(x) : x);
  }
}

/// Bits of floats are equal.
void expect_same(const at::Tensor& got, const at::Tensor& expected, const char* what) {
  ASSERT_TRUE(got.defined()) << what;
  EXPECT_TRUE(at::equal(got.view(at::kInt), expected.view(at::kInt))) << what;
}

// In parts, which compute-sanitizer runs one by one.
using Part = std::tuple<Size, at::ScalarType>;
class NormOperandCodes : public ::testing::TestWithParam<Part> {};

std::string part_name(const ::testing::TestParamInfo<Part>& info) {
  const auto& [size, dtype] = info.param;
  return std::to_string(size.rows) + "x" + std::to_string(size.cols) + "_" + c10::toString(dtype);
}

TEST_P(NormOperandCodes, AreThoseOfTheValues) {
  if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(3);
  const auto& [size, dtype] = GetParam();
  Differences found;
  for_values(size, dtype, [&](const at::Tensor& x) {
    for_norms(x, [&](const Normalization& norm) {
      const auto [y, statistics] = normalized(x, norm);
      const PlainOperand plain(y);
      const at::Tensor amax = activation_amax(y);
      for (const char* name : kPacked) {
        const Format& format = find_format(name);
        const bool one_scale = packed_scale_mode(format) == ScaleMode::kTensor;
        for (const Orientations asked : kAsked) {
          const OperandRequest request{.format = &format, .orientations = asked};
          const QuantizedMatrix expected = plain.codes(request);
          const NormOperand fresh(x, norm);
          found.add(fresh.codes(request), expected);
          expect_same(fresh.statistics(), statistics, "statistics");
          EXPECT_EQ(fresh.amax().defined(), one_scale);
          if (one_scale) expect_same(fresh.amax(), amax, "amax");
          // As backward knows them.
          const NormOperand known(x, norm, fresh.statistics(), fresh.amax());
          found.add(known.codes(request), expected);
        }
      }
      ASSERT_EQ(found.codes, 0);
      ASSERT_EQ(found.scales, 0);
    });
  });
  found.expect_none("norm");
}

INSTANTIATE_TEST_SUITE_P(All, NormOperandCodes,
                         ::testing::Combine(::testing::ValuesIn(kSizes),
                                            ::testing::ValuesIn(kDtypes)),
                         part_name);

TEST(NormOperand, OneServesRequestsInAnyOrder) {
  if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(7);
  Differences found;
  // Begins between vectors, in rows that are parts of longer ones.
  const at::Tensor x = at::randn({131, 300}).to(gpu(), at::kBFloat16).narrow(1, 3, 264);
  for_norms(x, [&](const Normalization& norm) {
    const auto [y, statistics] = normalized(x, norm);
    const PlainOperand plain(y);
    const NormOperand operand(x, norm);
    EXPECT_FALSE(operand.statistics().defined());
    for (const char* name :
         {"float8_blockwise", "float8_rowwise", "float8_tensorwise", "float8_blockwise"}) {
      for (const Orientations asked : kAsked) {
        const OperandRequest request{.format = &find_format(name), .orientations = asked};
        found.add(operand.codes(request), plain.codes(request));
      }
    }
    expect_same(operand.statistics(), statistics, "statistics");
    EXPECT_TRUE(at::equal(operand.values(at::kBFloat16), y));
    const NormOperand unquantized(x, norm);
    EXPECT_TRUE(at::equal(unquantized.values(at::kBFloat16), y));
    expect_same(unquantized.statistics(), statistics, "statistics of values");
  });
  found.expect_none("norm, in any order");
}

TEST(NormOperand, DelayedScalingCollectsTheValuesAmax) {
  if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(6);
  Differences found;
  for (const at::ScalarType dtype : kDtypes) {
    for (const float earlier : {0.f, 1.5f}) {
      for (const bool odd : {false, true}) {
        at::Tensor x = at::randn({129, 104}).to(gpu(), dtype);
        if (odd) x = with_odd(x);
        for_norms(x, [&](const Normalization& norm) {
          const at::Tensor y = std::get<0>(normalized(x, norm));
          const DelayedCodes expected = delayed_codes(PlainOperand(y), earlier);
          const NormOperand operand(x, norm);
          for (int turn = 0; turn < 2; ++turn) {  // the second has an amax
            const DelayedCodes got = delayed_codes(operand, earlier);
            found.add(got.codes, expected.codes);
            EXPECT_TRUE(got.history.equal(expected.history));
          }
          expect_same(operand.amax(), activation_amax(y), "amax");
        });
      }
    }
  }
  found.expect_none("norm, by earlier steps");
}

TEST(NormOperand, TorchComputesWhatNoKernelTakes) {
  at::manual_seed(8);
  for (const at::Device device : devices()) {
    for (const int64_t cols : {96, 100}) {
      if (device.is_cuda() && cols % 8 == 0) continue;
      const at::Tensor x = at::randn({33, cols}).to(device, at::kBFloat16);
      for_norms(x, [&](const Normalization& norm) {
        const NormOperand operand(x, norm);
        at::Tensor wide = x.to(at::kDouble);
        if (!norm.rms) wide = wide - wide.mean({1}, true);
        at::Tensor exact = wide * (wide.square().mean({1}, true) + norm.eps).rsqrt() *
                           (norm.weight.to(at::kDouble) + (norm.zero_centered_gamma ? 1 : 0));
        if (norm.bias.defined()) exact = exact + norm.bias;
        const at::Tensor values = operand.values(at::kBFloat16);
        EXPECT_EQ(values.scalar_type(), at::kBFloat16);
        EXPECT_TRUE(at::allclose(values.to(at::kDouble), exact, 0x1p-8, 1e-5));
        EXPECT_FALSE(operand.statistics().defined());
        const OperandRequest request{.format = &find_format("float8_tensorwise"),
                                     .orientations = {true, true}};
        if (device.is_cpu()) {
          EXPECT_THROW(operand.codes(request), c10::Error);
          return;
        }
        Differences found;
        found.add(operand.codes(request), PlainOperand(values).codes(request));
        found.expect_none("norm by torch's operators");
      });
    }
  }
}

TEST(NormOperand, RowImagesAreThoseOfTheValues) {
  at::manual_seed(4);
  for (const at::Device device : devices()) {
    for (const char* name : {"mxfp8", "nvfp4"}) {
      const at::Tensor x = at::randn({130, 72}).to(device, at::kBFloat16);
      for_norms(x, [&](const Normalization& norm) {
        const NormOperand operand(x, norm);
        expect_row_images_of(operand, operand.values(at::kBFloat16), name);
      });
    }
  }
}

TEST(NormOperand, LinearMultipliesTheValues) {
  at::manual_seed(5);
  for (const at::Device device : devices()) {
    for (const char* name :
         {"float8_tensorwise", "float8_rowwise", "float8_blockwise", "mxfp8", "nvfp4"}) {
      const auto weight = linear_weight(at::randn({48, 64}).to(device), whole(name, 48, 64));
      const at::Tensor x = at::randn({33, 64}).to(device, at::kBFloat16);
      for_norms(x, [&](const Normalization& norm) {
        const NormOperand operand(x, norm);
        const at::Tensor got = linear_forward(operand, weight, std::nullopt, false).output;
        EXPECT_TRUE(at::equal(got, forward_of(operand.values(at::kBFloat16), weight))) << name;
      });
    }
  }
}

TEST(NormOperand, HasNoRowsToNormalize) {
  const at::Tensor x = at::empty({0, 64}).to(gpu(), at::kBFloat16);
  const NormOperand operand(x, {.weight = at::ones({64}).to(gpu()), .eps = 1e-5f, .rms = true});
  EXPECT_EQ(operand.values(at::kBFloat16).sizes(), x.sizes());
  if (!gpu().is_cuda()) return;
  const OperandRequest request{.format = &find_format("float8_blockwise"),
                               .orientations = {true, true}};
  EXPECT_EQ(operand.codes(request).rows, 0);
}

}  // namespace
}  // namespace qshard::testing
