#include "kernels/gemm/gemm_verdicts.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "kernels/format/shown_name.h"

namespace qshard {

std::string_view name_of(GemmVerdict verdict) {
  switch (verdict) {
    case GemmVerdict::kUnchecked:
      return "unchecked";
    case GemmVerdict::kTrusted:
      return "trusted";
    case GemmVerdict::kRight:
      return "right";
    case GemmVerdict::kWrong:
      return "wrong";
  }
  return "";
}

std::span<const TrustedGemms> trusted_gemms() {
  // The first, of no GPU, lets the file have no line.
  static constexpr TrustedGemms kTrusted[] = {
      {0, ""},
#include "kernels/gemm/trusted_gemms.inc"
  };
  return std::span(kTrusted).subspan(1);
}

GemmCheckOptions GemmCheckOptions::parse(std::string_view words) {
  GemmCheckOptions options;
  while (!words.empty()) {
    const std::string_view word = words.substr(0, words.find(','));
    words.remove_prefix(std::min(words.size(), word.size() + 1));
    if (word == "error") {
      options.is_fatal = true;
    } else if (word == "always") {
      options.is_always = true;
    } else if (word == "break") {
      options.breaks = true;
    } else {
      TORCH_CHECK_VALUE(word == "warn",
                        "qshard: the environment variable QSHARD_GEMM_CHECK takes "
                        "warn, error and always, with commas between them, got '",
                        shown_name(word), "'");
    }
  }
  return options;
}

GemmVerdicts::GemmVerdicts(std::span<const TrustedGemms> trusted, GemmCheckOptions options)
    : options_(options) {
  if (options.is_always || options.breaks) return;
  for (const TrustedGemms& gemms : trusted) {
    verdicts_[place_of(find_format(gemms.format), gemms.capability)] = GemmVerdict::kTrusted;
  }
}

size_t GemmVerdicts::place_of(const Format& format, int capability) {
  const ActivationCodes& own = format.activations;
  const ActivationCodes& base = base_format(format.index).activations;
  const bool other_gradients = own.gradient_dtype != base.gradient_dtype;
  const bool other_columns = own.packed_input_columns != base.packed_input_columns;
  const size_t variant = 2 * size_t{other_gradients} + size_t{other_columns};
  const auto row = std::min(static_cast<size_t>(std::max(capability, 0)), kMaxCapability - 1);
  return (row * kMaxFormats + static_cast<size_t>(format.index) % kMaxFormats) * kVariants +
         variant;
}

void GemmVerdicts::settle(const Format& format, int capability, const Check& check) {
  const size_t place = place_of(format, capability);
  std::atomic<GemmVerdict>& verdict = verdicts_[place];
  std::string found;
  if (verdict.load(std::memory_order_acquire) == GemmVerdict::kUnchecked) {
    const std::lock_guard lock(mutex_);
    if (verdict.load(std::memory_order_relaxed) == GemmVerdict::kUnchecked) {
      constexpr int kMostFailures = 8;
      if (failures_[place] == kMostFailures) return;
      const std::optional<std::string> wrong = check();
      if (!wrong) {
        ++failures_[place];
        return;
      }
      found = *wrong;
      verdict.store(found.empty() ? GemmVerdict::kRight : GemmVerdict::kWrong,
                    std::memory_order_release);
    }
  }
  if (verdict.load(std::memory_order_acquire) != GemmVerdict::kWrong) return;
  const auto where = fmt::format(
      "qshard: on GPUs of compute capability {}.{} GEMMs of {} codes "
      "are wrong{}",
      capability / 10, capability % 10, format.name, found.empty() ? "" : ": " + found);
  TORCH_CHECK(!options_.is_fatal, where,
              ". Without QSHARD_GEMM_CHECK=error linears with such weights multiply dequantized "
              "values; `python -m qshard verify` prints what to report");
  if (!found.empty()) {
    TORCH_WARN(where,
               ". Linears and experts with such weights multiply dequantized values there. This is "
               "reported once; `python -m qshard verify` prints what to report");
  }
}

GemmVerdicts& gemm_verdicts() {
  static GemmVerdicts verdicts(trusted_gemms(), [] {
    const char* words = std::getenv("QSHARD_GEMM_CHECK");
    return GemmCheckOptions::parse(words == nullptr ? "" : words);
  }());
  return verdicts;
}

}  // namespace qshard
