// Which GEMM path each linear took: the counts behind backend_report().
#pragma once

#include <cstdint>
#include <string>

#include "kernels/format/formats.h"

namespace qshard {

enum class GemmDirection : uint8_t { kForward, kGradInput, kGradWeight };
constexpr int kGemmDirections = 3;
/// "forward", "grad_input" or "grad_weight".
const char* name_of(GemmDirection direction);

/// Why a GEMM ran on a dequantized weight.
enum class GemmFallback : uint8_t {
  kNone,  // it did not: FP8, block-scaled or emulated, as its format says
  // What follows up to kWrong needs no warning.
  kWeightOnly,
  kCpu,
  kWrong,  // warned about when it was found
  kDevice,
  kOneRowBlocks,
  kDtype,
  kOutFeatures,
  kWindow,
  kAlignment,
  kTooLarge,
  kNoKernel,
  kNoGroupedGemm,
};
constexpr int kGemmFallbacks = 13;

/// How a GEMM of many experts ran (kernels/grouped).
enum class GroupedPath : uint8_t {
  kCodes,   // one GEMM of codes
  kValues,  // one of dequantized codes
  kEach,    // each expert by itself, which needs the groups' ends on the host
};

/// In words; "" for kNone. `format`: of the weight.
std::string_view gemm_fallback_reason(const Format& format, GemmFallback fallback);

/// Counts one GEMM. The first time a CUDA tensor meets a fallback, warns with its reason.
void record_gemm(const Format& format, GemmDirection direction, GemmFallback fallback);

/// Counts one GEMM of many experts, which took this path because there is none of codes, `why`.
/// `waits`: the host waited for the device. The first time experts on a GPU meet a reason, warns
/// with it.
void record_grouped_gemm(const Format& format, GemmDirection direction, GroupedPath path,
                         GemmFallback why, bool waits);

/// Counts one call of torch's operator `op` on what the codes of a tensor stand for: bmm,
/// say, has no GEMM of codes.
void record_dequantized(const Format& format, const char* op);

/// One line per path taken in this process.
std::string gemm_report();

}  // namespace qshard
