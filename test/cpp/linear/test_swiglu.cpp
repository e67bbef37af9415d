// Codes of silu(gate) * up and of its gradients: those of the values, which torch's operators leave
// in memory. So for other activations: codes of the values that kernels/numerics/activations.h
// gives.
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include "kernels/linear/swiglu_operand.h"
#include "test/cpp/cases/activation_cases.h"
#include "test/cpp/cases/gemm_cases.h"
#include "test/cpp/cases/packed_cases.h"

namespace qshard::testing {
namespace {

struct Shape {
  int64_t rows, cols;
};
constexpr Shape kShapes[] = {{1, 1},    {1, 96},     {127, 96},   {127, 4104}, {129, 100},
                             {300, 45}, {4097, 512}, {513, 4096}, {0, 128},    {130, 256}};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

/// gate, up and the gradient of their product.
struct Values {
  at::Tensor gate, up, grad;
};

/// A request for the codes of both gradients.
SwigluBackwardRequest gradients_of(const Format& format, Orientations orientations, bool joined) {
  SwigluBackwardRequest request;
  request.gradients.format = &format;
  request.gradients.role = OperandRole::kGradient;
  request.gradients.orientations = orientations;
  request.joined = joined;
  return request;
}

// `joined`: gate and up are halves of one matrix. `odd`: with what no activation should have.
Values random_values(const Shape& shape, at::ScalarType dtype, at::Device device, bool joined,
                     bool odd) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const auto draw = [&](int64_t cols) {
    at::Tensor x = at::randn({shape.rows, cols}).mul_(3).to(options);
    if (odd && x.numel() > 40) {
      constexpr float kOdd[] = {std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN(),
                                0.f,
                                -0.f,
                                -120.f,
                                -87.5f,
                                120.f};
      at::Tensor flat = x.view(-1);
      for (int64_t i = 0; i < 8; ++i) flat[5 * i].fill_(kOdd[i]);
    }
    return x;
  };
  Values out;
  const at::Tensor both = draw(2 * shape.cols);
  out.gate = both.narrow(1, 0, shape.cols);
  out.up = both.narrow(1, shape.cols, shape.cols);
  if (!joined) {
    out.gate = out.gate.contiguous();
    out.up = out.up.contiguous();
  }
  out.grad = draw(shape.cols);
  return out;
}

/// Calls run(values, joined) for all shapes. Without up: gate is the half of a longer matrix where
/// it would be joined.
template <typename Run>
void for_shapes(at::ScalarType dtype, const Run& run, bool gated = true) {
  for (const Shape& shape : kShapes) {
    for (const bool joined : {false, true}) {
      for (const bool odd : {false, true}) {
        SCOPED_TRACE(::testing::Message() << shape.rows << "x" << shape.cols
                                          << (joined ? " joined" : "") << (odd ? " odd" : ""));
        Values x = random_values(shape, dtype, gpu(), joined, odd);
        if (!gated) x.up = at::Tensor();
        run(x, joined && gated);
      }
    }
  }
}

// One test for each format, dtype and activation, which compute-sanitizer runs one by one.
class SwigluCodes
    : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType, ActivationCase>> {
 protected:
  void SetUp() override {
    if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
    at::manual_seed(3);
  }
  static const Format& format() { return find_format(std::get<0>(GetParam())); }
  static at::ScalarType dtype() { return std::get<1>(GetParam()); }
  static ActivationCase of() { return std::get<2>(GetParam()); }
  static bool is_swiglu() { return of().gated && of().activation == Activation::kSilu; }
  static at::Tensor values(const Values& x) {
    return is_swiglu() ? swiglu_values(x.gate, x.up) : values_by_kernel(of(), x.gate, x.up);
  }
  /// Torch's where the kernel cannot: joined ones that do not begin at a tile.
  static std::pair<at::Tensor, at::Tensor> gradients(const Values& x, bool joined) {
    const bool by_kernel = !is_swiglu() && !(joined && x.gate.size(1) % 128 != 0);
    return by_kernel ? gradients_by_kernel(of(), x.grad, x.gate, x.up)
                     : swiglu_gradients(x.grad, x.gate, x.up, of().activation);
  }
  static SwigluOperand operand(const Values& x, at::Tensor maxima = {}) {
    return {x.gate, x.up, std::move(maxima), of().activation};
  }
  /// The kernel's order of additions is that of one; torch's is another.
  static void expect_sums(const at::Tensor& got, const at::Tensor& grad_gate,
                          const at::Tensor& grad_up, bool joined) {
    const int64_t k = grad_gate.size(1);
    const auto expect = [&](const at::Tensor& sums, const at::Tensor& grad) {
      const at::Tensor expected = column_sums_by_kernel(grad);
      const bool in_order = !is_swiglu() && !(joined && k % 128 != 0);
      if (in_order) {
        EXPECT_TRUE(same_values(sums, expected));
      } else {
        EXPECT_TRUE(at::allclose(sums, expected, 1e-3, 1e-3 * grad.size(0), /*equal_nan=*/true));
      }
    };
    expect(got.narrow(0, 0, k), grad_gate);
    if (grad_up.defined()) expect(got.narrow(0, k, k), grad_up);
  }
  /// None differ but those where torch has another exponential.
  static void expect_same(const Differences& found, const char* what) {
    if (is_swiglu()) {
      found.expect_few(what);
    } else {
      found.expect_none(what);
    }
  }
  template <typename Run>
  static void for_values(const Run& run) {
    for_shapes(dtype(), run, of().gated);
  }
};

std::string codes_name(const ::testing::TestParamInfo<SwigluCodes::ParamType>& info) {
  const auto& [format, dtype, of] = info.param;
  return kernel_name({std::tuple(format, dtype), 0}) + "_" + of.name;
}

TEST_P(SwigluCodes, AreThoseOfTheValues) {
  Differences found;
  for_values([&](const Values& x, bool) {
    const PlainOperand plain(values(x));
    at::Tensor maxima;
    for (const Orientations asked :
         {Orientations{true, false}, Orientations{true, true}, Orientations{false, true}}) {
      const SwigluOperand product = operand(x, maxima);
      const OperandRequest request{.format = &format(), .orientations = asked};
      found.add(product.codes(request), plain.codes(request));
      EXPECT_EQ(product.maxima().defined(), packed_scale_mode(format()) == ScaleMode::kTensor);
      maxima = product.maxima();  // those of the first serve the others
    }
  });
  expect_same(found, of().name);
}

TEST(Swiglu, DelayedScalingCollectsTheProductsAmax) {
  if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(6);
  Differences found;
  for (const at::ScalarType dtype : kDtypes) {
    for (const float earlier : {0.f, 1.5f}) {
      for (const bool odd : {false, true}) {
        const Values x = random_values({129, 100}, dtype, gpu(), /*joined=*/true, odd);
        const SwigluOperand operand(x.gate, x.up);
        const DelayedCodes got = delayed_codes(operand, earlier);
        const DelayedCodes expected =
            delayed_codes(PlainOperand(swiglu_values(x.gate, x.up)), earlier);
        found.add(got.codes, expected.codes);
        EXPECT_TRUE(got.history.equal(expected.history));
        EXPECT_FALSE(operand.maxima().defined());
      }
    }
  }
  found.expect_few("SwiGLU, by earlier steps");
}

/// By plain torch: the largest magnitudes of the strips that swiglu_maxima_numel counts.
at::Tensor largest_of_strips(const at::Tensor& x) {
  const auto padded = at::constant_pad_nd(
      x.abs().to(at::kFloat),
      {0, round_up(x.size(1), 128) - x.size(1), 0, round_up(x.size(0), 128) - x.size(0)});
  const auto strips = padded.view({padded.size(0) / 128, 16, 8, padded.size(1) / 128, 128});
  return strips.amax({2, 4}).transpose(1, 2).flatten();
}

TEST(Swiglu, MaximaAreThoseOfTheValues) {
  if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(8);
  for (const at::ScalarType dtype : kDtypes) {
    for_shapes(dtype, [&](const Values& x, bool) {
      const SwigluOperand operand(x.gate, x.up);
      operand.codes({.format = &find_format("float8_tensorwise"), .orientations = {true, false}});
      const at::Tensor maxima = operand.maxima();
      ASSERT_EQ(maxima.numel(), swiglu_maxima_numel(x.gate.size(0), x.gate.size(1)));
      if (x.gate.numel() == 0) return;
      const auto same = [](const at::Tensor& got, const at::Tensor& expected) {
        // CUDA's exponential and torch's may differ in the last bit of silu.
        return at::allclose(got, expected, 0.02, 1e-6, /*equal_nan=*/true);
      };
      const at::Tensor of_strips = maxima.narrow(0, 1, maxima.numel() - 1).view({-1, 2});
      EXPECT_TRUE(same(of_strips.select(1, 0), largest_of_strips(at::silu(x.gate))));
      EXPECT_TRUE(at::equal(of_strips.select(1, 1).nan_to_num(-1.),
                            largest_of_strips(x.up).nan_to_num(-1.)));
      EXPECT_TRUE(same(maxima.narrow(0, 0, 1), activation_amax(swiglu_values(x.gate, x.up))));
    });
  }
}

// One gate of each strip is not zero, and the maxima give its silu.
TEST(Swiglu, SiluOfEveryBFloat16) {
  if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
  const at::Tensor every = at::arange(-32768, 32768, at::kShort).view(at::kBFloat16).to(gpu());
  const at::Tensor gate = at::zeros({8 * every.numel(), 128}, every.options());
  gate.view({every.numel(), 8, 128}).select(1, 3).select(1, 77).copy_(every);
  const SwigluOperand operand(gate, gate);
  operand.codes({.format = &find_format("float8_tensorwise"), .orientations = {true, false}});
  const at::Tensor maxima = operand.maxima();
  const at::Tensor got = maxima.narrow(0, 1, maxima.numel() - 1).view({-1, 2}).select(1, 0);
  const at::Tensor torchs = at::silu(every);
  // Below -88.7 fp32's exponential is infinite, and silu is 0.
  const at::Tensor exact =
      at::where(every.abs() < 87, at::silu(every.to(at::kDouble)).to(at::kBFloat16), torchs);
  for (const at::Tensor& silu : {exact, torchs}) {
    const at::Tensor expected = silu.abs().to(at::kFloat);
    EXPECT_TRUE(at::equal(got.isnan(), expected.isnan()));
    const at::Tensor differ = got.nan_to_num(-1.).ne(expected.nan_to_num(-1.));
    EXPECT_LE(differ.sum().item<int64_t>(), 2);  // ties, as near as fp32 is to them
  }
}

// So for the others: on GPUs the bits are those of the CPU.
TEST(Swiglu, ActivationsOfEveryBFloat16AreTheCpus) {
  if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
  const at::Tensor every = at::arange(-32768, 32768, at::kShort).view(at::kBFloat16).to(gpu());
  const at::Tensor gate = at::zeros({8 * every.numel(), 128}, every.options());
  gate.view({every.numel(), 8, 128}).select(1, 3).select(1, 77).copy_(every);
  for (const ActivationCase& of : kOtherActivations) {
    const SwigluOperand operand(gate, of.gated ? gate : at::Tensor(), {}, of.activation);
    operand.codes({.format = &find_format("float8_tensorwise"), .orientations = {true, false}});
    const at::Tensor maxima = operand.maxima();
    const at::Tensor got = maxima.narrow(0, 1, maxima.numel() - 1).view({-1, 2}).select(1, 0);
    const ActivationCase alone = {of.name, of.activation, false};
    const at::Tensor expected = values_by_kernel(alone, every, {}).abs().to(at::kFloat);
    EXPECT_TRUE(at::equal(got.nan_to_num(-1.), expected.nan_to_num(-1.))) << of.name;
  }
}

// What kernels are compared with, beside torch's operators.
TEST(Swiglu, ValuesOfTheReferenceAreTorchs) {
  at::manual_seed(9);
  for (const ActivationCase& of : kOtherActivations) {
    for (const at::ScalarType dtype : kDtypes) {
      SCOPED_TRACE(of.name);
      Values x = random_values({300, 45}, dtype, at::kCPU, /*joined=*/true, /*odd=*/true);
      if (!of.gated) x.up = at::Tensor();
      const double epsilon = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 2e-3 : 1.6e-2;
      const auto expect_close = [&](const at::Tensor& got, const at::Tensor& expected) {
        // Torch's derivative of GELU is up to 1e-6 off, and multiplied by up to 80.
        EXPECT_TRUE(at::allclose(got, expected, epsilon, 1e-4, /*equal_nan=*/true));
      };
      expect_close(values_by_kernel(of, x.gate, x.up), swiglu_values(x.gate, x.up, of.activation));
      const auto got = gradients_by_kernel(of, x.grad, x.gate, x.up);
      const auto expected = swiglu_gradients(x.grad, x.gate, x.up, of.activation);
      expect_close(got.first, expected.first);
      ASSERT_EQ(got.second.defined(), of.gated);
      if (of.gated) expect_close(got.second, expected.second);
    }
  }
}

TEST(Swiglu, SumsOfTheReferenceAreSums) {
  at::manual_seed(10);
  for (const int64_t rows : {0, 1, 127, 128, 129, 1300}) {
    for (const at::ScalarType dtype : kDtypes) {
      const at::Tensor x = at::randn({rows, 19}).to(dtype);
      EXPECT_TRUE(at::allclose(column_sums_by_kernel(x).to(at::kDouble), x.to(at::kDouble).sum(0),
                               1e-5, 1e-4));
    }
  }
}

// What is not looked at changes no scale.
TEST_P(SwigluCodes, OfGradientsAreTheSameWithMaxima) {
  Differences found;
  for_values([&](const Values& x, bool joined) {
    const int64_t m = x.gate.size(0);
    const int64_t k = x.gate.size(1);
    // A few rows and columns far above the rest, as gradients and activations have them.
    at::Tensor grad = x.grad.clone();
    if (m > 200) grad.narrow(0, m / 2, 1).mul_(300);
    SwigluBackwardRequest request = gradients_of(format(), {true, true}, joined);
    request.input = &format();
    request.activation = of().activation;
    const SwigluBackward without = swiglu_backward(grad, x.gate, x.up, request);
    const SwigluOperand product = operand(x);
    product.codes({.format = &format(), .orientations = {true, false}});
    const auto amax = activation_amax(values(x));
    for (const at::Tensor& maxima : {product.maxima(), swiglu_maxima(amax, m, k)}) {
      request.maxima = maxima;
      const SwigluBackward with = swiglu_backward(grad, x.gate, x.up, request);
      found.add(with.gate, without.gate);
      if (!joined && of().gated) found.add(with.up, without.up);
    }
  });
  found.expect_none("SwiGLU's gradients, with maxima");
}

TEST_P(SwigluCodes, OfGradientsAreThoseOfTheValues) {
  Differences found, inputs;
  for_values([&](const Values& x, bool joined) {
    const auto [grad_gate, grad_up] = gradients(x, joined);
    const SwigluOperand product = operand(x);
    for (const char* input : {"", "float8_tensorwise", "float8_rowwise", "float8_blockwise",
                              "float8_blockwise[x_block_scaling_dim=1]"}) {
      for (const Orientations asked : {Orientations{true, true}, Orientations{false, true}}) {
        SwigluBackwardRequest request = gradients_of(format(), asked, joined);
        if (*input != 0) request.input = &find_format(input);
        if (!is_swiglu() && std::string_view(input) == "float8_rowwise")
          continue;  // of torch's values
        request.activation = of().activation;
        const int64_t k = x.gate.size(1);
        request.column_sums =
            at::full({of().gated ? 2 * k : k}, -1, x.grad.options().dtype(at::kFloat));
        const SwigluBackward made = swiglu_backward(x.grad, x.gate, x.up, request);
        expect_sums(request.column_sums, grad_gate, grad_up, joined);
        if (joined) {
          const PlainOperand both(at::cat({grad_gate, grad_up}, 1));
          found.add(made.gate, both.codes(request.gradients));
        } else {
          found.add(made.gate, PlainOperand(grad_gate).codes(request.gradients));
          if (of().gated) found.add(made.up, PlainOperand(grad_up).codes(request.gradients));
        }
        if (request.input == nullptr) continue;
        inputs.add(made.input,
                   product.codes({.format = request.input, .orientations = {.columnwise = true}}));
      }
    }
  });
  expect_same(found, "gradients");
  expect_same(inputs, "what is made with gradients");
}

INSTANTIATE_TEST_SUITE_P(All, SwigluCodes,
                         ::testing::Combine(::testing::ValuesIn(kPacked),
                                            ::testing::ValuesIn(kDtypes),
                                            ::testing::Values(kSwigluCase)),
                         codes_name);
INSTANTIATE_TEST_SUITE_P(
    Others, SwigluCodes,
    ::testing::Combine(::testing::Values("float8_tensorwise", "float8_blockwise",
                                         "float8_blockwise[x_block_scaling_dim=1]"),
                       ::testing::ValuesIn(kDtypes), ::testing::ValuesIn(kOtherActivations)),
    codes_name);

TEST(Swiglu, RowImagesAreThoseOfTheValues) {
  at::manual_seed(4);
  for (const at::Device device : devices()) {
    for (const char* name : {"mxfp8", "nvfp4"}) {
      const Values x = random_values({130, 72}, at::kBFloat16, device, true, false);
      expect_row_images_of(SwigluOperand(x.gate, x.up), at::silu(x.gate) * x.up, name);
      expect_row_images_of(SwigluOperand(x.gate, {}, {}, Activation::kGelu),
                           at::gelu(x.gate, "tanh"), name);
    }
  }
}

TEST(Swiglu, LinearMultipliesTheProduct) {
  at::manual_seed(5);
  for (const at::Device device : devices()) {
    for (const char* name :
         {"float8_tensorwise", "float8_rowwise", "float8_blockwise", "mxfp8", "nvfp4"}) {
      const auto weight = linear_weight(at::randn({48, 64}).to(device), whole(name, 48, 64));
      const Values x = random_values({33, 64}, at::kBFloat16, device, true, false);
      const SwigluOperand operand(x.gate, x.up);
      const at::Tensor got = linear_forward(operand, weight, std::nullopt, false).output;
      const at::Tensor expected = forward_of(swiglu_values(x.gate, x.up), weight);
      if (device.is_cpu()) {
        EXPECT_TRUE(at::equal(got, expected)) << name;
      } else {
        EXPECT_TRUE(at::allclose(got, expected, 1e-2, 1e-1)) << name;
      }
    }
  }
}

TEST(Swiglu, HasNoPackedCodesOnCpu) {
  const Values x = random_values({4, 32}, at::kFloat, at::kCPU, false, false);
  const OperandRequest request{.format = &find_format("float8_blockwise"),
                               .orientations = {.rowwise = true}};
  EXPECT_THROW(SwigluOperand(x.gate, x.up).codes(request), c10::Error);
  EXPECT_THROW(swiglu_backward(x.grad, x.gate, x.up, {.gradients = request}), c10::Error);
}

TEST(CachedOperand, MakesBothOrientationsAtOnce) {
  const at::Device device = gpu();
  if (!device.is_cuda()) GTEST_SKIP() << "no CUDA device";
  const PlainOperand plain(at::randn({64, 32}, at::TensorOptions().device(device)));
  const CachedOperand cached(plain, {true, true});
  OperandRequest request{.format = &find_format("float8_tensorwise"),
                         .orientations = {.rowwise = true}};
  const QuantizedMatrix rows = cached.codes(request);
  EXPECT_TRUE(rows.has({true, true}, OperandLayout::kPacked));
  request.orientations = {.columnwise = true};
  EXPECT_TRUE(bytes_of(cached.codes(request).columnwise).is_same(bytes_of(rows.columnwise)));
}

}  // namespace
}  // namespace qshard::testing
