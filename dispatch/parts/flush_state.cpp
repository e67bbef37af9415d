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
  state_ = State::kCodesStale;
  start_generation();
  forget_amax();
  ++writes_;
  watch_.note();
  return true;
}

void FlushState::write(at::Device device) {
  notice_other_memory();
  state_ = State::kCodesStale;
  forget_amax();
  ++writes_;
  write_stream_ = current_device_stream(device);
  watch_.expect_version_bump();
}

void FlushState::write_with_amax(at::Device device, at::Tensor amax,
                                 at::Tensor speculative_scale_inv, bool codes_current) {
  write(device);
  watch_.note();
  known_amax_ = std::move(amax);
  speculative_scale_inv_ = std::move(speculative_scale_inv);
  if (!codes_current) return;
  state_ = State::kCodesCurrent;
  start_generation();
  may_be_replayed_ |= is_capturing(device);
}

void FlushState::mark_remote_write() {
  notice_other_memory();
  state_ = state_of(true, codes_current());
  watch_.note();
}

void FlushState::requantize(FlushEvent flushed) {
  start_generation();
  may_be_replayed_ |= flushed.is_captured();
  flushed_ = std::move(flushed);
  // With stale codes the known amaxes are those before the value was rounded by this rank's scales.
  // If they were kept, the next flush would take the codes for final.
  if (!codes_current()) forget_amax();
}

void FlushState::mark_codes_current(at::Tensor amax) {
  // A write that only a counter told of is forgotten by noting it: say it first.
  state_ = state_of(is_written_here(), true);
  may_differ_.in_codes = false;
  if (amax.defined()) known_amax_ = std::move(amax);
  speculative_scale_inv_.reset();
  watch_.note();
}

void FlushState::mark_scales_synced() {
  state_ = State::kScalesSynced;
  may_differ_.in_codes = false;
  forget_amax();
  watch_.note();
}

void FlushState::replace_rows(const FlushState& from, bool same_amax) {
  if (is_written_here() || from.is_written_here()) leave_scales_synced();
  may_differ_.in_writes |= from.may_differ_.in_writes;
  may_differ_.in_codes |= from.may_differ_.in_codes;
  may_differ_.kept_scaling_state = true;
  if (!same_amax) known_amax_.reset();
  speculative_scale_inv_.reset();
  ++writes_;
}

void FlushState::copy_of(const FlushState& other, bool same_amax, at::Device device) {
  state_ = state_of(other.is_written_here(), other.codes_current());
  may_differ_.in_writes |= other.may_differ_.in_writes;
  may_differ_.in_codes = other.may_differ_.in_codes;
  may_differ_.kept_scaling_state = other.may_differ_.kept_scaling_state;
  ++writes_;
  generation_ = other.generation_;
  known_amax_ = other.knows_amax() && same_amax ? other.known_amax_.to(device) : at::Tensor();
  speculative_scale_inv_.reset();
  write_stream_ = current_device_stream(device);
  watch_.note();
}

void FlushState::restore(bool written, bool codes_current, MayDiffer may_differ) {
  state_ = state_of(written, codes_current);
  may_differ_ = may_differ;
  forget_amax();
  watch_.note();
}

void FlushState::release() {
  forget_amax();
  watch_.watch(MemoryWatch());
  flushed_ = {};
}

void notice_unseen_write(FlushState& state, at::Device device) {
  if (!state.watch().has_moved()) return;
  state.write(device);
  state.watch().note();  // the counter has moved already: no move follows, as after a kernel
}

}  // namespace qshard
