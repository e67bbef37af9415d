// The words that ranks agree on in one meeting: amaxes, and what rides behind them. Here they are
// packed, reduced and written into histories, of quantized tensors (requantize.h) and of weights
// that stay plain (ops/wire/agree_on_ranges.h) alike.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <vector>

#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/parts/rank_group.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard {

/// Float32 words of all weights of a meeting in one vector, which ranks reduce by the largest bits.
/// Bits of numbers that are not negative order as the numbers do, with NaN on top.
///
/// Its prefix are the words that ranks with other parts of the full tensors agree on, too: all of
/// them, unless end_full_tensor_prefix() says where it ends.
class AmaxVector {
 public:
  AmaxVector(int64_t numel, at::Device device)
      : words_(at::empty({numel}, at::TensorOptions().dtype(at::kFloat).device(device))) {}

  /// The next `count` words.
  std::span<float> take(int64_t count) {
    const std::span<float> taken(words_.mutable_data_ptr<float>() + taken_,
                                 static_cast<size_t>(count));
    taken_ += count;
    return taken;
  }
  void zero(std::span<float> words) {
    if (!words.empty()) tensor_of(words).zero_();
  }
  const at::Tensor& words() const { return words_; }
  at::Tensor tensor_of(std::span<float> words) const {
    return words_.narrow(0, words.data() - words_.const_data_ptr<float>(),
                         static_cast<int64_t>(words.size()));
  }
  /// The words taken so far.
  at::Tensor taken() const { return words_.narrow(0, 0, taken_); }
  /// The words taken so far are the prefix.
  void end_full_tensor_prefix() { full_tensor_prefix_ = taken(); }
  /// `front` has the amaxes of a full tensor, whose own place, beside those of its blocks, is
  /// `behind`.
  void stands_for(std::span<float> front, std::span<float> behind) {
    in_front_.push_back(tensor_of(front));
    behind_.push_back(tensor_of(behind));
  }

  /// Puts what states have collected in the step under way into their words.
  void collect(std::span<const StateTask> tasks) const {
    collect_state(tasks, current_stream(words_.device()));
  }
  /// Agrees with the ranks that hold other rows, then with those that hold other parts of full
  /// tensors. Replicas have the same values, and meet after steps alone, for what histories
  /// collect. Every rank knows how many words there are: that depends on the logical tensors and
  /// the groups, and in front on the full tensors.
  void reduce(const Groups& groups, FlushKind kind) const {
    const at::Tensor bits = taken().view(at::kInt);
    if (bits.numel() == 0) return;
    if (groups.shard) groups.shard->all_reduce_max(bits);
    const at::Tensor front =
        full_tensor_prefix_.defined() ? full_tensor_prefix_.view(at::kInt) : bits;
    if (front.numel() > 0 && !groups.tensor.empty()) {
      if (!in_front_.empty()) at::_foreach_copy_(in_front_, behind_);
      for (const RankGroupPtr& group : groups.tensor) group->all_reduce_max(front);
      if (!in_front_.empty()) at::_foreach_copy_(behind_, in_front_);
    }
    if (kind != FlushKind::kStep) return;
    for (const RankGroupPtr& group : groups.replicas) group->all_reduce_max(bits);
  }
  /// Brings states up to date, and replaces amaxes by those to scale by. `found_inf`: undefined, or
  /// a number on any device, that GradScaler sets where the step changed nothing.
  void apply(std::span<const StateTask> tasks, FlushKind kind, const at::Tensor& found_inf) const {
    at::Tensor skipped;
    if (!tasks.empty() && found_inf.defined()) skipped = found_inf.to(words_.device(), at::kFloat);
    apply_state(tasks, kind, skipped.defined() ? skipped.const_data_ptr<float>() : nullptr,
                current_stream(words_.device()));
  }

 private:
  at::Tensor words_, full_tensor_prefix_;
  std::vector<at::Tensor> in_front_, behind_;
  int64_t taken_ = 0;
};

}  // namespace qshard
