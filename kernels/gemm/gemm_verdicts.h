// Whether GEMMs of a format's codes are right on a kind of GPU.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kernels/format/formats.h"

namespace qshard {

enum class GemmVerdict : uint8_t {
  kUnchecked,
  kTrusted,  // `python -m qshard verify` saw them right on such a GPU (trusted_gemms.inc)
  kRight,    // small products were, at the first use (kernels/checks/first_use.h)
  kWrong,    // they were not: linears and experts multiply dequantized values
};
std::string_view name_of(GemmVerdict verdict);

/// A kind of GPU, as its compute capability (90 for 9.0), and a format whose GEMMs are right there.
struct TrustedGemms {
  int capability;
  std::string_view format;
};
/// Those of trusted_gemms.inc, which docs/trusted_gpus.py writes.
std::span<const TrustedGemms> trusted_gemms();

/// What the environment variable QSHARD_GEMM_CHECK asks for: words with commas between them.
struct GemmCheckOptions {
  bool is_fatal = false;   // "error": wrong GEMMs are an error
  bool is_always = false;  // "always": trusted GPUs are checked as well
  bool breaks = false;     // "break": products are made wrong, so that tests see how that is found

  /// @throws c10::ValueError for other words, "warn" apart, which is what no word means.
  static GemmCheckOptions parse(std::string_view words);
};

/// One verdict for each compute capability and kind of GEMM: variants of a format that quantize
/// activations alike share it. Safe to use from any thread.
class GemmVerdicts {
 public:
  GemmVerdicts(std::span<const TrustedGemms> trusted, GemmCheckOptions options);

  const GemmCheckOptions& options() const { return options_; }
  GemmVerdict of(const Format& format, int capability) const {
    return verdicts_[place_of(format, capability)].load(std::memory_order_acquire);
  }
  /// What is wrong, "" if nothing is; none if that could not be found out, which leaves the verdict
  /// open. After some such calls there are no more.
  using Check = std::function<std::optional<std::string>()>;
  /// Runs `check` if nothing is known yet. One thread runs it, and others wait for it. The first
  /// time GEMMs are found wrong this warns.
  /// @throws c10::Error for wrong ones, at every call, where options say so.
  void settle(const Format& format, int capability, const Check& check);

 private:
  static constexpr size_t kMaxFormats = 16;
  static constexpr size_t kVariants = 4;
  static constexpr size_t kMaxCapability = 160;

  static size_t place_of(const Format& format, int capability);

  GemmCheckOptions options_;
  std::array<std::atomic<GemmVerdict>, kMaxFormats * kVariants * kMaxCapability> verdicts_{};
  std::mutex mutex_;                // held while a check runs
  std::map<size_t, int> failures_;  // calls of a check that found nothing out, by place
};

/// Those of this process.
GemmVerdicts& gemm_verdicts();

}  // namespace qshard
