// The statistics of one weight's operands in the steps that a watch samples (qshard.watch).
//
// Off the sampled steps a linear looks at one flag. In them the linear adds what quantizing each of
// its operands lost to a tally on the device, and the flush of the step's end agrees on the tallies
// of all ranks (dispatch/flush/sampled_weights.h) and leaves them with the watch.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/statistics/tally.h"

namespace qshard {

/// What one flush has left: of weights that are known to the watch by a number each.
struct Sample {
  int64_t step = 0;
  std::vector<int64_t> weights;
  std::vector<int64_t> bytes;  // (weights, kWatchedOperands), this rank's
  at::Tensor statistics;       // float64 (weights, kWatchedOperands, kStatistics), of all ranks
};

/// One call of qshard.watch: which steps are sampled, and what has been found in them.
class Watch {
 public:
  explicit Watch(int64_t every) : every_(every) {}

  bool samples(int64_t step) const { return step % every_ == 0; }
  void leave(Sample sample);
  /// What has been left since the last call.
  std::vector<Sample> take();
  /// From now on nothing is sampled.
  void end() { has_ended_ = true; }
  bool has_ended() const { return has_ended_; }

 private:
  const int64_t every_;
  std::atomic<bool> has_ended_ = false;
  std::mutex mutex_;
  std::vector<Sample> samples_;
};

enum WatchedOperand : int { kWatchedWeight, kWatchedInput, kWatchedGradient, kWatchedOperands };

/// Counts what was quantized to `bytes`, for the linear that will be given these alone. Nothing is
/// counted where another backend's tensor has no place for it.
void keep_tally(const at::Tensor& bytes, const CodedMatrix& matrix);
/// `to` has the values that `from` was quantized to.
void pass_tally(const at::Tensor& from, const at::Tensor& to);
/// Whether any weight's step under way may be sampled: codes are made that go to a linear.
bool may_be_sampling();

/// A weight of a watch. Its gathered tensors share it.
class Watched {
 public:
  /// `step`: the number of the step under way, which is not sampled before begin_sample().
  Watched(std::shared_ptr<Watch> watch, int64_t number, int64_t step)
      : watch_(std::move(watch)), number_(number), step_(step) {}
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  ~Watched() { set_sampled(false); }

  const std::shared_ptr<Watch>& watch() const { return watch_; }
  int64_t number() const { return number_; }
  int64_t step() const { return step_; }
  bool is_sampled() const { return is_sampled_ && !watch_->has_ended(); }
  bool is_to_be_sampled() const { return !watch_->has_ended() && watch_->samples(step_); }

  /// Forgets what was found before.
  void begin_sample();
  /// Adds what was quantized on the device's current stream.
  void add(WatchedOperand operand, const CodedMatrix& matrix, at::Device device);
  /// The same of what was quantized before, as keep_tally() counted it. False if it was not called
  /// of the `tensor`.
  bool add_kept(WatchedOperand operand, const at::Tensor& tensor);
  /// int64 (kWatchedOperands, kStatistics) on `device`, with zeros where nothing was quantized.
  at::Tensor tallies(at::Device device);
  /// (kWatchedOperands,): of the codes and scales of one use.
  std::array<int64_t, kWatchedOperands> bytes();
  void end_step() {
    set_sampled(false);
    ++step_;
  }

 private:
  const std::shared_ptr<Watch> watch_;
  const int64_t number_;
  int64_t step_;
  std::atomic<bool> is_sampled_ = false;
  std::mutex mutex_;  // a backward has a thread for each device
  std::array<at::Tensor, kWatchedOperands> tallies_;
  std::array<int64_t, kWatchedOperands> bytes_ = {};

  void set_sampled(bool is_sampled);
};

}  // namespace qshard
