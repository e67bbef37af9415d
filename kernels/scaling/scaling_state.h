// What some formats remember from one flush to the next, beside image and grid: the amaxes of
// delayed scaling, the count of stochastic rounding. Small, and the same on all ranks but for
// `history[row][0]` of activations, which ranks agree on when an optimizer step ends. Functions
// throw c10::Error for device memory, as those of kernels/quantize/quantize.h do.
#pragma once

#include <span>

#include "kernels/device/stream.h"
#include "kernels/format/layout.h"

namespace qshard {

// Delayed scaling (TransformerEngine's DelayedScaling; arXiv:2209.05433, section 3.3) keeps two
// float32 tables. Their rows are the weight's matrices, then its linear's input, then the gradient
// of its linear's output.
//
//   amax_history  (rows, length): slot 0 collects the step under way, the others hold earlier
//                 steps, oldest first
//   scaling_amax  (rows, kScalingAmaxes): what scales are made of, as scale = code_max / amax, with
//                 2^margin multiplied in; 0 where there is none yet
enum ScalingAmax : int {
  kInUse,   // of the present codes; of the next activations
  kNext,    // of the codes that the next optimizer step makes
  kOfData,  // the amax of the values that the present codes stand for, without margin
  kScalingAmaxes,
};

constexpr int64_t kActivationRows = 2;

/// Rows of both tables.
inline int64_t scaling_rows(const Layout& layout) { return layout.matrices() + kActivationRows; }
inline int64_t input_row(const Layout& layout) { return layout.matrices(); }
inline int64_t gradient_row(const Layout& layout) { return layout.matrices() + 1; }

// Stochastic rounding keeps three non-negative int32: the low and the high 31 bits of its key, and
// the number of optimizer steps that rounded (kernels/quantize/quantize.h).
constexpr int64_t kRoundingWords = 3;

/// Words that ride behind a task's amaxes when ranks agree (largest int32 wins): the activations'
/// amaxes of the step under way, then the three of stochastic rounding.
inline int64_t state_words(const Format& format) {
  return (format.amax_history.length > 0 ? kActivationRows : 0) +
         (format.stochastic_rounding ? kRoundingWords : 0);
}

/// The state of one buffer. All pointers are memory of the call's stream.
struct StateTask {
  Layout layout;
  DType value_dtype = DType::kFloat32;  // of the buffer's values
  float* amax = nullptr;                // (grid_numel,) of the weight's matrices
  float* words = nullptr;               // (state_words,)
  float* amax_history = nullptr;        // null without delayed scaling
  float* scaling_amax = nullptr;        // the same
  int32_t* rounding = nullptr;          // (kRoundingWords,), null if rounding is to nearest
};

enum class FlushKind : uint8_t {
  kStep,         // an optimizer step made these values
  kOutsideStep,  // initialisation, a load, a write of the user's
};

/// Fills `words` with this rank's.
void collect_state(std::span<const StateTask> tasks, Stream stream);

/// Once ranks have agreed on `amax` and `words`: replaces `amax` by the ones to scale by, which
/// quantize() then takes, and brings the state up to date.
///
/// After a step codes are scaled by what the step before left (kNext); the history takes up the new
/// amaxes, rolls, and gives the next; the count goes up. A non-finite amax leaves no trace in the
/// history, and where it has no amax above 0 the scale stays. Otherwise nothing rolls: values whose
/// amax is that of the present codes keep their scale, so that a checkpoint resumes bit for bit,
/// and new values are scaled by their own amax.
///
/// found_inf: null, or a float on the device, non-zero if GradScaler made the step change nothing;
/// the flush is then one of kOutsideStep.
void apply_state(std::span<const StateTask> tasks, FlushKind kind, const float* found_inf,
                 Stream stream);

/// The rows of one activation in both tables; null without delayed scaling.
struct DelayedAmax {
  float* history = nullptr;
  const float* scaling = nullptr;
  int margin = 0;

  explicit operator bool() const { return history != nullptr; }
};

/// Delayed scaling of one activation with amax `*amax`, in place: collects it in history[0]
/// unless it is not finite, and sets `*amax` to the one to scale by, which is its own before the
/// first step.
void delay_amax(float* amax, const DelayedAmax& delayed, Stream stream);

}  // namespace qshard
