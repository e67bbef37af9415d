// Amaxes and histories of weights that stay plain, and of the ranges of them that flat parameters
// cut: what the flush is to quantized tensors (dispatch/flush/requantize.h).
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

namespace qshard {

/// What a rank knows of a range when it meets the others: bits.
enum Step : int64_t {
  kNoStep = 0,   // they meet for values that no optimizer step made
  kStep = 1,     // they meet after a step; set on all ranks or none
  kHeld = 2,     // whose optimizer holds the weight, or a piece of it, on this rank
  kReached = 4,  // a backward of this rank has reached the weight since its history rolled
  kOfIt = kStep | kHeld | kReached,
};

/// Brings amaxes of ranges, and delayed scaling of their weights, up to date, with one all-reduce
/// for each group of ranks.
///
/// Range i has `values[i]` of a weight of `formats[i]`, with rows, cols and start in
/// geometry[3i, 3i + 3): plain, contiguous, float32, bfloat16, float16 or float64, on any device.
/// `own` and `amax`: none, or float32 (grid_rows * grid_cols,) for each range. `own` takes the
/// amaxes of the values; where `is_known` is set, it has them already, and `values[i]` is empty.
/// `amax` takes what whole weights are scaled by; ranks meet on its device, else on the values'.
/// `state`: amax_history and scaling_amax of each range whose format has them, one after the other,
/// on that device. `steps`: Step; which ranges are kNoStep is the same on all ranks. `groups`:
/// the number of _groups() for each range, or 0 where this rank knows all of its weight. Replicas,
/// which have the same values, meet after steps only, for what histories collect.
///
/// A history rolls if any rank's optimizer holds the weight and any rank's backward reached it: the
/// one that steps a piece may have no gradient of its own. Returns whether it rolls, as 0 or 1.
/// Nothing but `own` is written before the ranks have agreed.
/// @throws c10::ValueError and c10::TypeError for arguments that do not fit together, before
/// anything is sent.
std::vector<int64_t> agree_on_ranges(at::TensorList values, const std::vector<std::string>& formats,
                                     at::IntArrayRef geometry, at::TensorList own,
                                     const c10::List<bool>& is_known, at::TensorList amax,
                                     at::TensorList state, at::IntArrayRef steps,
                                     at::IntArrayRef groups,
                                     const std::optional<at::Tensor>& found_inf);

/// What a rank knows of a weight whose history its group agrees on.
enum Level : int64_t {
  kNothing,     // it has no such weight, or nothing to add
  kIsHere,      // it has the weight
  kWasStepped,  // and a step was of it
};

/// What histories have collected since they rolled, agreed on by the ranks of groups, before values
/// are there that a step made. `amax_history[i]`: float32 (3, length), or empty for kNothing.
/// `levels`: Level; the largest on any rank is returned. `device`: where they meet, which all ranks
/// know.
/// @throws c10::ValueError for tensors and levels that do not fit, before anything is sent.
std::vector<int64_t> agree_on_histories(at::TensorList amax_history, at::IntArrayRef levels,
                                        int64_t groups, at::Device device);

}  // namespace qshard
