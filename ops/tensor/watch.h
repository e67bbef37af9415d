// What qshard.watch asks of the library: torch.classes.qshard.Watch (ops/classes.cpp).
#pragma once

#include <torch/custom_class.h>

#include <memory>
#include <tuple>
#include <vector>

#include "kernels/statistics/watched.h"

namespace qshard {

/// A watch (kernels/statistics/watched.h) as Python holds it.
class StatisticsWatch : public torch::CustomClassHolder {
 public:
  /// @throws c10::ValueError unless `every` is at least 1.
  explicit StatisticsWatch(int64_t every);
  const std::shared_ptr<Watch>& watch() const { return watch_; }

 private:
  std::shared_ptr<Watch> watch_;
};

using WatchPtr = c10::intrusive_ptr<StatisticsWatch>;

/// Looks at a quantized weight from now on, which gets the number; `step` is that of the step under
/// way.
/// @throws c10::Error for a tensor that is not quantized, or that another watch looks at.
void add_watched(const WatchPtr& self, const at::Tensor& weight, int64_t number, int64_t step);
/// What flushes have left since the last call (Sample): step, numbers of weights, bytes of their
/// operands, and statistics, float64 (weights, 3, 9) on the device of the weights.
std::vector<std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>, at::Tensor>>
take_samples(const WatchPtr& self);
/// Looks at no weight any more.
void end_watch(const WatchPtr& self);

}  // namespace qshard
