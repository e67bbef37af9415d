// The plain tensors in which a quantized tensor keeps what its format remembers between flushes.
#pragma once

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "kernels/scaling/scaling_state.h"

namespace qshard {

/// Small tensors outside the packed storage, undefined where the format has no use for them
/// (kernels/scaling/scaling_state.h). Copies share them: a gathered tensor's linear collects into
/// its shard's. They may lie on another device than the planes: those of a CPU-offloaded shard are
/// where its linear runs.
struct ScalingState {
  at::Tensor amax_history;   // float32 (matrices + 2, length)
  at::Tensor scaling_amax;   // float32 (matrices + 2, 3)
  at::Tensor rounding;       // int32 (3,)
  int64_t rounding_key = 0;  // of a tensor on the meta device, where `rounding` has no data

  bool is_defined() const { return amax_history.defined() || rounding.defined(); }
  at::Device device() const;
  bool is_meta() const { return is_defined() && device().is_meta(); }
  int64_t nbytes() const;
  /// The defined ones and their names.
  std::vector<std::pair<const char*, at::Tensor>> tensors() const;

  /// A copy of its own on `device`; one of meta tensors is as if fresh.
  ScalingState copy_to(at::Device device) const;
  /// A copy of its own, on the same device, for a tensor of some of the `layout`'s matrices. From
  /// matrix `first` on they are taken in runs of `run`; `index` (1-D) names the runs.
  ScalingState copy_of_matrices(const Layout& layout, int64_t first, int64_t run,
                                const at::Tensor& index) const;
  /// Takes over the numbers of another buffer's state of the same format and shape.
  void copy_from(const ScalingState& other);

  /// The state of a tensor that was never flushed. The key of stochastic rounding is torch's seed.
  static ScalingState fresh(const Layout& layout, at::Device device);

  /// A state that shares these tensors, in the order of tensors().
  /// @throws c10::Error for another number of tensors than the format has.
  static ScalingState of(const Layout& layout, at::TensorList tensors);

  /// Sets the key of stochastic rounding, at least 0 and below 2^62, and its count to 0.
  void set_rounding_key(int64_t key);
};

}  // namespace qshard
