#include "ops/tensor/watch.h"

#include <utility>

#include "dispatch/flush/sampled_weights.h"
#include "dispatch/tensor/quantized_tensor_impl.h"

namespace qshard {

StatisticsWatch::StatisticsWatch(int64_t every) {
  TORCH_CHECK_VALUE(every >= 1, "qshard.watch: every must be at least 1 step, got ", every);
  watch_ = std::make_shared<Watch>(every);
}

void add_watched(const WatchPtr& self, const at::Tensor& weight, int64_t number, int64_t step) {
  TORCH_CHECK_VALUE(step >= 0, "qshard.watch: step must be at least 0, got ", step);
  add_to_watch(*impl_of(weight).buffer()->original(), self->watch(), number, step);
}

std::vector<std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>, at::Tensor>>
take_samples(const WatchPtr& self) {
  std::vector<std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>, at::Tensor>> taken;
  for (Sample& sample : self->watch()->take()) {
    taken.emplace_back(sample.step, std::move(sample.weights), std::move(sample.bytes),
                       std::move(sample.statistics));
  }
  return taken;
}

void end_watch(const WatchPtr& self) { self->watch()->end(); }

}  // namespace qshard
