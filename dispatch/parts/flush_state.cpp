#include "dispatch/parts/flush_state.h"

#include <atomic>
#include <utility>

#include "kernels/device/capture.h"

namespace qshard {

int64_t FlushState::next_generation() {
  static std::atomic<int64_t> counter{0};
  return ++counter;
}

std::optional<c10::Stream> FlushState::write_stream() const {
  return watch_.has_moved() ? std::nullopt : write_stream_;
}

bool FlushState::notice_other_memory() {
  if (!watch_.has_other_memory()) return false;
  state_ = State::kStale;
  start_generation();
  forget_amax();
  ++writes_;
  watch_.note();
  return true;
}

void FlushState::write(at::Device device) {
  notice_other_memory();
  state_ = State::kStale;
  forget_amax();
  ++writes_;
  write_stream_ = current_device_stream(device);
  watch_.note_before_bump();
}

void FlushState::write_with_amax(at::Device device, at::Tensor amax, at::Tensor provisional,
                                 bool shown) {
  write(device);
  watch_.note();
  known_amax_ = std::move(amax);
  provisional_ = std::move(provisional);
  if (!shown) return;
  state_ = State::kShown;
  start_generation();
  may_be_replayed_ |= is_capturing(device);
}

void FlushState::write_elsewhere() {
  notice_other_memory();
  state_ = state_of(true, is_shown());
  watch_.note();
}

void FlushState::requantize(FlushEvent flushed) {
  start_generation();
  may_be_replayed_ |= flushed.is_captured();
  flushed_ = std::move(flushed);
  // Amaxes of a value that was not shown are those before it was rounded by scales of this rank
  // alone: with them the flush to come would take the codes for settled.
  if (!is_shown()) forget_amax();
}

void FlushState::show(at::Tensor amax) {
  // A write that only a counter told of is forgotten by noting it: say it first.
  state_ = state_of(is_written_here(), true);
  if (amax.defined()) known_amax_ = std::move(amax);
  provisional_.reset();
  watch_.note();
}

void FlushState::agree() {
  state_ = State::kAgreed;
  forget_amax();
  watch_.note();
}

void FlushState::replace_rows(const FlushState& from, bool same_amax) {
  if (is_written_here() || from.is_written_here()) leave_agreed();
  may_differ_.in_writes |= from.may_differ_.in_writes;
  may_differ_.kept_scaling_state = true;
  if (!same_amax) known_amax_.reset();
  provisional_.reset();
  ++writes_;
}

void FlushState::copy_of(const FlushState& other, bool same_amax, at::Device device) {
  state_ = state_of(other.is_written_here(), other.is_shown());
  may_differ_.in_writes |= other.may_differ_.in_writes;
  may_differ_.kept_scaling_state = other.may_differ_.kept_scaling_state;
  ++writes_;
  generation_ = other.generation_;
  known_amax_ = other.knows_amax() && same_amax ? other.known_amax_.to(device) : at::Tensor();
  provisional_.reset();
  write_stream_ = current_device_stream(device);
  watch_.note();
}

void FlushState::restore(bool written, bool shown, MayDiffer may_differ) {
  state_ = state_of(written, shown);
  may_differ_ = may_differ;
  forget_amax();
  watch_.note();
}

void FlushState::release() {
  forget_amax();
  watch_.watch(MemoryWatch());
  flushed_ = {};
}

}  // namespace qshard
