#include "kernels/statistics/watched.h"

#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "kernels/device/current_stream.h"
#include "kernels/statistics/statistics.h"
#include "kernels/tensors/kept_with_tensor.h"

namespace qshard {
namespace {

at::Tensor empty_tally(at::Device device) {
  return at::zeros({kStatistics}, at::TensorOptions().dtype(at::kLong).device(device));
}

std::atomic<int64_t>& sampled_weights() {
  static std::atomic<int64_t> count = 0;
  return count;
}

struct KeptTally final : c10::intrusive_ptr_target {
  at::Tensor tally;
  int64_t bytes = 0;
};

/// Adds a tally to another on its device.
void merge(at::Tensor into, const at::Tensor& tally) {
  constexpr int64_t kCounts = kSums - kCount;
  into.narrow(0, 0, kCount).view(at::kDouble).add_(tally.narrow(0, 0, kCount).view(at::kDouble));
  into.narrow(0, kCount, kCounts).add_(tally.narrow(0, kCount, kCounts));
  at::Tensor maxima = into.narrow(0, kSums, kStatistics - kSums);
  maxima.copy_(at::maximum(maxima, tally.narrow(0, kSums, kStatistics - kSums)));
}

}  // namespace

void keep_tally(const at::Tensor& bytes, const CodedMatrix& matrix) {
  auto kept = c10::make_intrusive<KeptTally>();
  kept->tally = empty_tally(bytes.device());
  kept->bytes = matrix.bytes;
  add_statistics(matrix, kept->tally.mutable_data_ptr<int64_t>(), current_stream(bytes.device()));
  keep_with(*bytes.unsafeGetTensorImpl(), Kept::kTally, std::move(kept));
}

void pass_tally(const at::Tensor& from, const at::Tensor& to) {
  KeptThing kept = kept_with(*from.unsafeGetTensorImpl(), Kept::kTally);
  if (kept) keep_with(*to.unsafeGetTensorImpl(), Kept::kTally, std::move(kept));
}

bool may_be_sampling() { return sampled_weights() > 0; }

void Watch::leave(Sample sample) {
  const std::lock_guard lock(mutex_);
  samples_.push_back(std::move(sample));
}

std::vector<Sample> Watch::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(samples_, {});
}

void Watched::begin_sample() {
  const std::lock_guard lock(mutex_);
  tallies_ = {};
  bytes_ = {};
  set_sampled(true);
}

void Watched::set_sampled(bool is_sampled) {
  if (is_sampled_.exchange(is_sampled) != is_sampled) sampled_weights() += is_sampled ? 1 : -1;
}

void Watched::add(WatchedOperand operand, const CodedMatrix& matrix, at::Device device) {
  const std::lock_guard lock(mutex_);
  at::Tensor& tally = tallies_[operand];
  if (!tally.defined() || tally.device() != device) tally = empty_tally(device);
  bytes_[operand] = std::max(bytes_[operand], matrix.bytes);
  add_statistics(matrix, tally.mutable_data_ptr<int64_t>(), current_stream(device));
}

bool Watched::add_kept(WatchedOperand operand, const at::Tensor& tensor) {
  const KeptThing thing = kept_with(*tensor.unsafeGetTensorImpl(), Kept::kTally);
  const auto* kept = static_cast<const KeptTally*>(thing.get());
  if (kept == nullptr) return false;
  const std::lock_guard lock(mutex_);
  at::Tensor& tally = tallies_[operand];
  if (!tally.defined() || tally.device() != tensor.device()) tally = empty_tally(tensor.device());
  bytes_[operand] = std::max(bytes_[operand], kept->bytes);
  merge(tally, kept->tally);
  return true;
}

at::Tensor Watched::tallies(at::Device device) {
  const std::lock_guard lock(mutex_);
  std::vector<at::Tensor> all;
  for (const at::Tensor& tally : tallies_) {
    all.push_back(tally.defined() ? tally.to(device) : empty_tally(device));
  }
  return at::stack(all);
}

std::array<int64_t, kWatchedOperands> Watched::bytes() {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace qshard
