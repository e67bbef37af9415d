// What tells right GEMMs from wrong ones: small products, and the verdicts that are kept of them.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/checks/small_products.h"
#include "kernels/gemm/gemm_verdicts.h"
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {
namespace {

// The emulated GEMMs with products that something has happened to.
class Altered final : public QuantizedGemmBackend {
 public:
  using Change = std::function<at::Tensor(at::Tensor, GemmDirection)>;
  Altered(const Format& format, Change change)
      : whole_(quantized_backend(format)), change_(std::move(change)) {}

  GemmFallback supports(const GemmProblem& problem) const override {
    return whole_.supports(problem);
  }
  OperandLayout operand_layout() const override { return whole_.operand_layout(); }
  at::Tensor run(const GemmTask& task) const override {
    return change_(whole_.run(task), task.direction);
  }

 private:
  const QuantizedGemmBackend& whole_;
  Change change_;
};

std::string wrong(const Format& format, Altered::Change change) {
  return wrong_product(Altered(format, std::move(change)), format, at::kCPU);
}

std::vector<std::string> emulated_formats() {
  std::vector<std::string> names;
  for (const Format& format : formats()) names.push_back(std::string(format.name) + "[emulate]");
  names.insert(names.end(),
               {"float8_delayed[e4m3,emulate]", "float8_blockwise[x_block_scaling_dim=1,emulate]"});
  return names;
}

class EmulatedProducts : public ::testing::TestWithParam<std::string> {};

TEST_P(EmulatedProducts, RightOnesAreRight) {
  const Format& format = find_format(GetParam());
  EXPECT_EQ(wrong_product(quantized_backend(format), format, at::kCPU), "");
}

TEST_P(EmulatedProducts, AWrongBlockIsFoundInEachDirection) {
  const Format& format = find_format(GetParam());
  const std::pair<GemmDirection, std::string> kCases[] = {
      {GemmDirection::kForward, "forward"},
      {GemmDirection::kGradInput, "grad_input"},
      {GemmDirection::kGradWeight, "grad_weight"}};
  for (const auto& [direction, name] : kCases) {
    if (direction == GemmDirection::kGradInput && !format.gemm.transposes_weight) continue;
    const std::string found = wrong(format, [at = direction](at::Tensor out, GemmDirection of) {
      if (of == at) out.narrow(0, 16, 16).narrow(1, 32, 16).mul_(2);
      return out;
    });
    EXPECT_EQ(found.rfind(name + " with ", 0), 0u) << found;
  }
}

TEST(SmallProducts, WhatIsWrongAndWhatIsNot) {
  const Format& format = find_format("float8_blockwise[emulate]");
  // Tensor cores cut what they add to 14 bits.
  EXPECT_EQ(wrong(format, [](at::Tensor out, GemmDirection) { return out.mul(1 + 0x1p-14); }), "");
  EXPECT_NE(wrong(format, [](at::Tensor out, GemmDirection) { return out.mul(1 + 0x1p-6); }), "");
  EXPECT_NE(wrong(format, [](at::Tensor out, GemmDirection) { return out.roll(16, 0); }), "");
  EXPECT_NE(wrong(format, [](at::Tensor out, GemmDirection) { return out.zero_(); }), "");
  const auto not_a_number = [](at::Tensor out, GemmDirection) {
    out[5][7] = std::numeric_limits<double>::quiet_NaN();
    return out;
  };
  EXPECT_NE(wrong(format, not_a_number), "");
}

// Linears dequantize there.
TEST(SmallProducts, NoKernelIsNotWrong) {
  const Format& format = find_format("float8_blockwise[emulate]");
  EXPECT_EQ(wrong(format, [](at::Tensor, GemmDirection) { return at::Tensor(); }), "");
}

INSTANTIATE_TEST_SUITE_P(Formats, EmulatedProducts, ::testing::ValuesIn(emulated_formats()),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) c = std::isalnum(c) ? c : '_';
                           return name;
                         });

// On a GPU they are the real ones.
TEST(SmallProducts, OfThisMachine) {
  for (const at::Device device : devices()) {
    for (const Format& format : formats()) {
      SCOPED_TRACE(::testing::Message() << device << " " << format.name);
      EXPECT_EQ(wrong_product(quantized_backend(format), format, device), "");
      if (!device.is_cuda()) continue;
      EXPECT_EQ(wrong_grouped_product(format, device), "");
    }
  }
}

// ----------------------------------------------------------------------------------- verdicts

class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

const Format& kBlocks = find_format("float8_blockwise");
const GemmVerdicts::Check kFindsNothing = [] { return std::string(); };
const GemmVerdicts::Check kFindsWrong = [] { return std::string("forward is off"); };
const GemmVerdicts::Check kFails = []() -> std::optional<std::string> { return std::nullopt; };
const GemmVerdicts::Check kIsNotAsked = []() -> std::optional<std::string> {
  ADD_FAILURE() << "checked";
  return "";
};

TEST(GemmVerdicts, OneCheckSettlesAFormatOnAKindOfGpu) {
  GemmVerdicts verdicts({}, {});
  EXPECT_EQ(verdicts.of(kBlocks, 90), GemmVerdict::kUnchecked);
  verdicts.settle(kBlocks, 90, kFails);
  EXPECT_EQ(verdicts.of(kBlocks, 90), GemmVerdict::kUnchecked);
  verdicts.settle(kBlocks, 90, kFindsNothing);
  EXPECT_EQ(verdicts.of(kBlocks, 90), GemmVerdict::kRight);
  verdicts.settle(kBlocks, 90, kIsNotAsked);
  EXPECT_EQ(verdicts.of(kBlocks, 100), GemmVerdict::kUnchecked);
  EXPECT_EQ(verdicts.of(find_format("float8_tensorwise"), 90), GemmVerdict::kUnchecked);
  // A variant with the same GEMMs, and one with others.
  EXPECT_EQ(verdicts.of(find_format("float8_blockwise[stochastic]"), 90), GemmVerdict::kRight);
  EXPECT_EQ(verdicts.of(find_format("float8_blockwise[x_block_scaling_dim=1]"), 90),
            GemmVerdict::kUnchecked);
}

TEST(GemmVerdicts, ChecksThatFindNothingOutEnd) {
  GemmVerdicts verdicts({}, {});
  int calls = 0;
  for (int i = 0; i < 100; ++i) {
    verdicts.settle(kBlocks, 90, [&]() -> std::optional<std::string> {
      ++calls;
      return std::nullopt;
    });
  }
  EXPECT_EQ(calls, 8);
  EXPECT_EQ(verdicts.of(kBlocks, 90), GemmVerdict::kUnchecked);
}

TEST(GemmVerdicts, WrongOnesAreWarnedAboutOnce) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  GemmVerdicts verdicts({}, {});
  verdicts.settle(kBlocks, 120, kFindsWrong);
  verdicts.settle(kBlocks, 120, kIsNotAsked);
  EXPECT_EQ(verdicts.of(kBlocks, 120), GemmVerdict::kWrong);
  ASSERT_EQ(warnings.messages.size(), 1u);
  EXPECT_NE(warnings.messages[0].find("on GPUs of compute capability 12.0 GEMMs of "
                                      "float8_blockwise codes are wrong: forward is off"),
            std::string::npos)
      << warnings.messages[0];
}

TEST(GemmVerdicts, WrongOnesAreAnErrorIfAskedFor) {
  GemmVerdicts verdicts({}, GemmCheckOptions::parse("error"));
  EXPECT_THROW(verdicts.settle(kBlocks, 90, kFindsWrong), c10::Error);
  EXPECT_THROW(verdicts.settle(kBlocks, 90, kIsNotAsked), c10::Error);
  EXPECT_NO_THROW(verdicts.settle(kBlocks, 100, kFindsNothing));
}

TEST(GemmVerdicts, TrustedOnesAreNotChecked) {
  const TrustedGemms trusted[] = {{90, "float8_blockwise"}, {90, "float8_delayed[e4m3]"}};
  GemmVerdicts verdicts(trusted, {});
  EXPECT_EQ(verdicts.of(kBlocks, 90), GemmVerdict::kTrusted);
  EXPECT_EQ(verdicts.of(find_format("float8_delayed[e4m3,margin=2]"), 90), GemmVerdict::kTrusted);
  EXPECT_EQ(verdicts.of(find_format("float8_delayed"), 90), GemmVerdict::kUnchecked);
  verdicts.settle(kBlocks, 90, kIsNotAsked);
  const GemmVerdicts always(trusted, GemmCheckOptions::parse("warn,always"));
  EXPECT_EQ(always.of(kBlocks, 90), GemmVerdict::kUnchecked);
}

TEST(GemmVerdicts, TheGeneratedListNamesFormatsThatRunThere) {
  for (const TrustedGemms& gemms : trusted_gemms()) {
    EXPECT_TRUE(find_format(gemms.format).gemm.runs_on(gemms.capability)) << gemms.format;
  }
}

TEST(GemmVerdicts, WordsOfTheEnvironment) {
  EXPECT_FALSE(GemmCheckOptions::parse("").is_fatal);
  EXPECT_FALSE(GemmCheckOptions::parse("warn").is_fatal);
  const auto both = GemmCheckOptions::parse("error,always");
  EXPECT_TRUE(both.is_fatal && both.is_always && !both.breaks);
  EXPECT_TRUE(GemmCheckOptions::parse("break").breaks);
  EXPECT_THROW(GemmCheckOptions::parse("eror"), c10::ValueError);
}

TEST(GemmVerdicts, ThreadsWaitForOneCheck) {
  GemmVerdicts verdicts({}, {});
  std::atomic<int> checks = 0, seen = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      verdicts.settle(kBlocks, 90, [&] {
        ++checks;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return std::string();
      });
      seen += verdicts.of(kBlocks, 90) == GemmVerdict::kRight;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(checks, 1);
  EXPECT_EQ(seen, 8);
}

}  // namespace
}  // namespace qshard::testing
