#include "kernels/gemm/gemm_report.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace qshard {
namespace {

constexpr size_t kMaxFormats = 16;
static_assert(kBaseFormats <= kMaxFormats);
using Counters = std::array<std::array<std::atomic<int64_t>, kGemmFallbacks>, kGemmDirections>;
// A variant counts with its base, but the emulated ones apart, in the second half.
std::array<Counters, 2 * kMaxFormats> counters{};

constexpr std::array<const char*, kGemmDirections> kDirectionNames{"forward", "grad_input",
                                                                   "grad_weight"};

size_t counters_of(int index, bool emulated) {
  return static_cast<size_t>(index) + (emulated ? kMaxFormats : 0);
}

/// How often each operator of torch's met dequantized codes, by format and operator.
struct DequantizedCalls {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, int64_t> counts;
};

/// A path that GEMMs of experts took. Formats live as long as the process.
struct GroupedCall {
  const Format* format;
  GemmDirection direction;
  GroupedPath path;
  GemmFallback why;
  bool waits;

  bool operator<(const GroupedCall& other) const {
    const auto key = [](const GroupedCall& call) {
      return std::tuple(call.format->name, call.direction, call.path, call.why, call.waits);
    };
    return key(*this) < key(other);
  }
};

/// How often each was taken.
struct GroupedCalls {
  std::mutex mutex;
  std::map<GroupedCall, int64_t> counts;
};

GroupedCalls& grouped_calls() {
  static GroupedCalls calls;
  return calls;
}

DequantizedCalls& dequantized_calls() {
  static DequantizedCalls calls;
  return calls;
}

std::string backend_of_codes(const Format& format, bool emulated) {
  if (emulated) return "emulated GEMM of dequantized codes";
  return format.gemm.kind == GemmKind::kPacked ? "cuBLASLt FP8" : "cuBLASLt block-scaled";
}

std::string words_of(const GroupedCall& call) {
  switch (call.path) {
    case GroupedPath::kCodes:
      return call.format->gemm.kind == GemmKind::kPacked ? "grouped FP8 GEMM"
                                                         : "grouped block-scaled GEMM";
    case GroupedPath::kValues:
      return call.why == GemmFallback::kNone
                 ? "grouped GEMM of values"
                 : fmt::format("grouped GEMM of dequantized codes ({})",
                               gemm_fallback_reason(*call.format, call.why));
    case GroupedPath::kEach:
      break;
  }
  return call.waits ? "one expert after the other, synchronises" : "one expert after the other";
}

// Whether no warning gave this reason yet; formats that run on the same devices share one.
bool is_new_reason(const Format& format, GemmFallback fallback) {
  static std::array<std::atomic<bool>, kGemmFallbacks> warned{};
  static std::array<std::atomic<bool>, kMaxFormats> warned_of_devices{};
  if (fallback != GemmFallback::kDevice) {
    return !warned[static_cast<size_t>(fallback)].exchange(true, std::memory_order_relaxed);
  }
  int same = 0;
  while (base_format(same).gemm.devices != format.gemm.devices) ++same;
  return !warned_of_devices[static_cast<size_t>(same)].exchange(true, std::memory_order_relaxed);
}

}  // namespace

const char* name_of(GemmDirection direction) {
  return kDirectionNames[static_cast<size_t>(direction)];
}

std::string_view gemm_fallback_reason(const Format& format, GemmFallback fallback) {
  switch (fallback) {
    case GemmFallback::kNone:
      return "";
    case GemmFallback::kWeightOnly:
      return "weight-only, as asked for";
    case GemmFallback::kCpu:
      return "no FP8 GEMM on CPU";
    case GemmFallback::kWrong:
      return "its GEMMs were found to be wrong on such a GPU";
    case GemmFallback::kDevice:
      return format.gemm.devices;
    case GemmFallback::kOneRowBlocks:
      return "scale blocks of one row have no transpose";
    case GemmFallback::kDtype:
      return "the input is not float32, bfloat16 or float16";
    case GemmFallback::kOutFeatures:
      return "the number of out features is not a multiple of 16";
    case GemmFallback::kWindow:
      return "the weight is a window that does not start at a scale block or spans several scales";
    case GemmFallback::kAlignment:
      return "the weight's rows are not 16-byte aligned";
    case GemmFallback::kTooLarge:
      return "a dimension is too large";
    case GemmFallback::kNoKernel:
      return "cuBLASLt has no kernel for the codes' shape or types";
    case GemmFallback::kNoGroupedGemm:
      return "there is no grouped GEMM of the format's codes";
  }
  return "";
}

void record_gemm(const Format& format, GemmDirection direction, GemmFallback fallback) {
  if (static_cast<size_t>(format.index) >= kMaxFormats) return;
  const size_t index = counters_of(format.index, format.emulated);
  const auto why = static_cast<size_t>(fallback);
  counters[index][static_cast<size_t>(direction)][why].fetch_add(1, std::memory_order_relaxed);
  if (fallback <= GemmFallback::kWrong) return;
  if (is_new_reason(format, fallback)) {
    TORCH_WARN(
        "qshard: a linear with a ", format.name, " weight runs on dequantized values because ",
        gemm_fallback_reason(format, fallback), ". This is reported once; see backend_report().");
  }
}

void record_grouped_gemm(const Format& format, GemmDirection direction, GroupedPath path,
                         GemmFallback why, bool waits) {
  {
    GroupedCalls& calls = grouped_calls();
    const std::lock_guard lock(calls.mutex);
    ++calls.counts[{&format, direction, path, why, waits}];
  }
  if (path == GroupedPath::kValues && why > GemmFallback::kWrong && is_new_reason(format, why)) {
    TORCH_WARN("qshard: experts with a ", format.name, " weight run on dequantized values because ",
               gemm_fallback_reason(format, why), ". This is reported once; see backend_report().");
  }
}

void record_dequantized(const Format& format, const char* op) {
  DequantizedCalls& calls = dequantized_calls();
  const std::lock_guard lock(calls.mutex);
  ++calls.counts[{std::string(format.name), op}];
}

std::string gemm_report() {
  std::string report;
  const auto add_lines = [&](const Format& format, bool emulated) {
    const Counters& of_format = counters[counters_of(format.index, emulated)];
    const std::string name = std::string(format.name) + (emulated ? "[emulate]" : "");
    for (size_t direction = 0; direction < kGemmDirections; ++direction) {
      for (size_t why = 0; why < kGemmFallbacks; ++why) {
        const int64_t count = of_format[direction][why].load(std::memory_order_relaxed);
        if (count == 0) continue;
        const auto fallback = static_cast<GemmFallback>(why);
        report += fallback == GemmFallback::kNone
                      ? fmt::format("{} {}: {}, {} times\n", name, kDirectionNames[direction],
                                    backend_of_codes(format, emulated), count)
                      : fmt::format("{} {}: dequantized GEMM, {} times: {}\n", name,
                                    kDirectionNames[direction], count,
                                    gemm_fallback_reason(format, fallback));
      }
    }
  };
  for (int index = 0; index < kBaseFormats; ++index) {
    add_lines(base_format(index), /*emulated=*/false);
    add_lines(base_format(index), /*emulated=*/true);
  }
  {
    GroupedCalls& calls = grouped_calls();
    const std::lock_guard lock(calls.mutex);
    for (const auto& [call, count] : calls.counts) {
      report += fmt::format("{} {} of experts: {}, {} times\n", call.format->name,
                            name_of(call.direction), words_of(call), count);
    }
  }
  DequantizedCalls& calls = dequantized_calls();
  const std::lock_guard lock(calls.mutex);
  for (const auto& [call, count] : calls.counts) {
    report += fmt::format("{} {}: dequantized codes, {} times\n", call.first, call.second, count);
  }
  return report;
}

}  // namespace qshard
