// LayerNorm and RMSNorm: the values and gradients of their formulas in fp64, the same in every run.
#include "kernels/norm/normalization.h"
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {
namespace {

struct Size {
  int64_t rows, cols;
};
// Parts of a warp, a warp, idle lanes, several blocks of rows, more rows than are taken at once,
// the longest rows of fp32 and of 16 bits.
constexpr Size kSizes[] = {{1, 8},
                           {3, 96},
                           {33, 104},
                           {127, 1024},
                           {513, 136},
                           {300, 4104},
                           {67, 4096},
                           {1700, 520},
                           {140000, 16},
                           {140, kMaxNormBytes / 4},
                           {140, kMaxNormBytes / 2}};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

struct Case {
  at::Tensor x, grad;
  Normalization norm;
};

Case random_case(const Size& size, at::ScalarType dtype, at::ScalarType weight_dtype, bool rms,
                 bool zero_centered, at::Device device) {
  Case out;
  const at::Tensor scales = at::randn({size.rows, 1}).exp_();
  // Begins between vectors, as a slice of something may.
  const at::Tensor flat = at::empty({size.rows * size.cols + 1}).to(device, dtype);
  out.x = flat.narrow(0, 1, size.rows * size.cols).view({size.rows, size.cols});
  out.x.copy_(at::randn({size.rows, size.cols}).mul_(scales).add_(0.5));
  out.grad = at::randn({size.rows, size.cols}).to(device, dtype);
  out.norm.weight = at::rand({size.cols}).add_(0.5).to(device, weight_dtype);
  if (!rms) out.norm.bias = at::randn({size.cols}).to(device, weight_dtype);
  out.norm.eps = 1e-5f;
  out.norm.rms = rms;
  out.norm.zero_centered_gamma = zero_centered;
  return out;
}

at::Tensor wide(const at::Tensor& x) { return x.cpu().to(at::kDouble); }

/// In fp64, on the CPU.
struct Exact {
  at::Tensor y, grad_x, grad_weight, grad_bias;

  explicit Exact(const Case& given) {
    const Normalization& norm = given.norm;
    const at::Tensor gamma = wide(norm.weight) + (norm.zero_centered_gamma ? 1 : 0);
    const at::Tensor grad = wide(given.grad);
    at::Tensor x = wide(given.x);
    if (!norm.rms) x = x - x.mean({1}, true);
    const at::Tensor rstd = (x.square().mean({1}, true) + norm.eps).rsqrt();
    const at::Tensor normed = x * rstd;
    y = normed * gamma;
    if (norm.bias.defined()) y = y + wide(norm.bias);
    const at::Tensor inner = grad * gamma;
    grad_x = inner - normed * (inner * normed).mean({1}, true);
    if (!norm.rms) grad_x = grad_x - inner.mean({1}, true);
    grad_x = grad_x * rstd;
    grad_weight = (grad * normed).sum(0);
    grad_bias = grad.sum(0);
  }
};

/// Rounded once: within one ulp, plus what fp32 sums are off by.
void expect_rounded(const at::Tensor& got, const at::Tensor& exact, at::ScalarType dtype,
                    const char* what) {
  EXPECT_EQ(got.scalar_type(), dtype) << what;
  const double epsilon = dtype == at::kBFloat16 ? 0x1p-7 : dtype == at::kHalf ? 0x1p-10 : 0x1p-23;
  const double scale = exact.abs().max().item<double>() * std::max(2e-6, epsilon / 64);
  const at::Tensor error = (wide(got) - exact).abs();
  EXPECT_TRUE((error <= exact.abs() * epsilon + scale).all().item<bool>())
      << what << ": off by up to " << error.max().item<double>();
}

void expect_formulas(const Case& given) {
  const Normalization& norm = given.norm;
  const at::ScalarType dtype = given.x.scalar_type(), weight_dtype = norm.weight.scalar_type();
  const Exact exact(given);
  const auto [y, statistics] = normalized(given.x, norm);
  expect_rounded(y, exact.y, dtype, "y");
  EXPECT_EQ(statistics.size(0), norm.rms ? 1 : 2);
  EXPECT_TRUE(at::equal(y, std::get<0>(normalized(given.x, norm))));

  const auto gradients = [&](bool needs_parameters) {
    return normalization_gradients(given.grad, given.x, statistics, norm, needs_parameters);
  };
  const auto [grad_x, grad_weight, grad_bias] = gradients(true);
  expect_rounded(grad_x, exact.grad_x, dtype, "gradient of x");
  expect_rounded(grad_weight, exact.grad_weight, weight_dtype, "gradient of weight");
  if (norm.rms) {
    EXPECT_EQ(grad_bias.numel(), 0);
  } else {
    expect_rounded(grad_bias, exact.grad_bias, weight_dtype, "gradient of bias");
  }
  const auto again = gradients(true);
  EXPECT_TRUE(at::equal(grad_x, std::get<0>(again)));
  EXPECT_TRUE(at::equal(grad_weight, std::get<1>(again)));
  const auto alone = gradients(false);
  EXPECT_TRUE(at::equal(grad_x, std::get<0>(alone)));
  EXPECT_EQ(std::get<1>(alone).numel(), 0);
}

TEST(Normalization, IsTheFormula) {
  const at::Device device = devices().back();
  if (!device.is_cuda()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(3);
  for (const Size& size : kSizes) {
    for (const at::ScalarType dtype : kDtypes) {
      if (size.cols * c10::elementSize(dtype) > kMaxNormBytes) continue;
      for (const at::ScalarType weight_dtype : {dtype, at::kFloat}) {
        for (const bool rms : {false, true}) {
          for (const bool zero_centered : {false, true}) {
            SCOPED_TRACE(::testing::Message()
                         << size.rows << "x" << size.cols << " " << c10::toString(dtype) << " by "
                         << c10::toString(weight_dtype) << (rms ? " RMSNorm" : " LayerNorm")
                         << (zero_centered ? " zero centered" : ""));
            expect_formulas(random_case(size, dtype, weight_dtype, rms, zero_centered, device));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace qshard::testing
