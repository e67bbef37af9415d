// Statistics of quantizing (kernels/statistics/watched.h) in the flush that ends a sampled step.
//
// Ranks reduce the words of a flush by the largest, which sums nothing. So each rank writes its
// sums into a place of its own, among zeros, and then adds those of all ranks in one order: every
// rank gets the same bits. Maxima need no places.
#pragma once

#include <vector>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// Whether the step under way is one that a watch of this weight samples: the same on all ranks,
/// which count its steps alike.
bool is_sampled(const QuantizedBuffer& buffer);

/// From now on `watch` knows the weight as `number`; `step` is the one under way.
/// @throws c10::Error if another watch looks at it.
void add_to_watch(QuantizedBuffer& buffer, const std::shared_ptr<Watch>& watch, int64_t number,
                  int64_t step);

/// After the flush of a step: the next begins. What it samples begins with the weights' own
/// statistics, of the codes that its linears will read.
void begin_next_step(const std::vector<BufferPtr>& buffers);

/// The sampled ones of some weights that ranks of these groups agree on.
class SampledWeights {
 public:
  SampledWeights() = default;
  SampledWeights(const std::vector<BufferPtr>& buffers, const std::vector<RankGroupPtr>& groups);

  /// int32 words of an agreement: (ranks, weights, operands, sums, 2), then (weights, operands,
  /// maxima).
  int64_t words() const;
  /// Writes this rank's.
  void write(at::Tensor words) const;
  /// Leaves those that ranks have agreed on with the watches.
  void leave(const at::Tensor& words) const;

 private:
  std::vector<BufferPtr> buffers_;
  int64_t ranks_ = 1;
  int64_t rank_ = 0;

  int64_t weights() const { return static_cast<int64_t>(buffers_.size()); }
  at::Tensor places(const at::Tensor& words) const;
  at::Tensor maxima(const at::Tensor& words) const;
};

}  // namespace qshard
