// Codes by the scale of the last input: those of two passes, whatever that was.
#include "kernels/linear/swiglu_operand.h"
#include "test/cpp/cases/gemm_cases.h"
#include "test/cpp/cases/packed_cases.h"
#ifdef QSHARD_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/linear/linear_fp8.h"
#endif

namespace qshard::testing {
namespace {

#ifdef QSHARD_WITH_CUDA
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Factors of one input after the other: scales that stay, rise and fall by one or many binades, of
// zeros, and after inputs that are not finite.
constexpr float kFactors[] = {1.f,  1.f, 1.01f, 2.f,  0.5f, 300.f, 1e-4f, 0.f,
                              0.5f, 1.f, kInf,  kInf, 1.f,  kNaN,  kNaN,  1.f};

class LastInput : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {
 protected:
  void SetUp() override {
    if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
    at::manual_seed(9);
  }
  OperandRequest request(LastInputAmax* last) const {
    return {.format = &find_format(std::get<0>(GetParam())),
            .orientations = {true, true},
            .last_input = last};
  }
  at::Tensor draw(int64_t rows, int64_t cols, float factor) const {
    at::Tensor x = at::randn({rows, cols});
    if (std::isfinite(factor)) {
      x.mul_(factor);
    } else {
      x.view(-1)[x.numel() / 2].fill_(factor);
    }
    return x.to(gpu(), std::get<1>(GetParam()));
  }
};

TEST_P(LastInput, CodesOfPlainInputsAreThoseOfTwoPasses) {
  for (const auto& [rows, cols] : {std::pair{1, 16}, {127, 96}, {300, 45}, {513, 1040}}) {
    Differences found;
    LastInputAmax last;
    for (const float factor : kFactors) {
      const at::Tensor x = draw(rows, cols, factor);
      at::Tensor amax, own;
      found.add(cuda::quantize_activation(x, request(&last), amax),
                cuda::quantize_activation(x, request(nullptr), own));
      ASSERT_EQ(amax.defined(), own.defined());
      if (!own.defined()) continue;
      EXPECT_TRUE(at::equal(amax.view(at::kInt), own.view(at::kInt))) << factor;
    }
    found.expect_none("codes by the last input's scale");
  }
}

TEST_P(LastInput, CodesOfSwigluAreThoseOfTwoPasses) {
  for (const auto& [rows, cols] : {std::pair{1, 16}, {127, 96}, {300, 45}, {513, 1040}}) {
    Differences found;
    LastInputAmax last;
    for (const float factor : kFactors) {
      const at::Tensor gate = draw(rows, cols, 1.f);
      const at::Tensor up = draw(rows, cols, factor);
      const SwigluOperand guessed(gate, up), known(gate, up);
      found.add(guessed.codes(request(&last)), known.codes(request(nullptr)));
      ASSERT_EQ(guessed.maxima().defined(), known.maxima().defined());
      if (!known.maxima().defined()) continue;
      EXPECT_TRUE(at::equal(guessed.maxima().view(at::kInt), known.maxima().view(at::kInt)));
    }
    found.expect_none("codes of SwiGLU by the last input's scale");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, LastInput,
    ::testing::Combine(::testing::Values("float8_tensorwise", "float8_tensorwise_fp32_scale",
                                         "float8_rowwise", "float8_blockwise"),
                       ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf)),
    kernel_name);

TEST(LastInputAmax, IsOfOneStream) {
  if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
  LastInputAmax last;
  const auto words = [&] {
    const auto use = last.use(gpu());
    return std::pair{use.last, static_cast<const float*>(use.next)};
  };
  const auto first = words();
  const auto second = words();
  EXPECT_NE(first.first, nullptr);
  EXPECT_EQ(first.second, second.first);
  EXPECT_EQ(second.second, first.first);
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  EXPECT_FALSE(last.use(gpu()));
  const auto there = words();  // it has moved
  EXPECT_NE(there.first, nullptr);
  EXPECT_NE(there.first, first.first);
}

TEST(LastInputAmax, AnotherThreadWaitsForAUseToEnd) {
  if (!gpu().is_cuda()) GTEST_SKIP() << "no CUDA device";
  LastInputAmax last;
  std::atomic<bool> is_used{false};
  auto use = last.use(gpu());
  ASSERT_TRUE(use);
  std::thread other([&] {
    const auto own = last.use(gpu());
    is_used = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(is_used);
  use = {};
  other.join();
  EXPECT_TRUE(is_used);
}
#endif

TEST(LastInputAmax, IsNotOfTheCpu) {
  LastInputAmax last;
  EXPECT_FALSE(last.use(at::kCPU));
}

}  // namespace
}  // namespace qshard::testing
