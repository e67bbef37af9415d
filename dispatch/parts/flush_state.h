// FlushState: whether codes are current, and whether all ranks have the same scales.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "dispatch/parts/streams.h"
#include "dispatch/parts/write_watch.h"

namespace qshard {

// Glossary
//
//   written        changed since the last flush that all ranks of the group took part in. All ranks
//                  have the same answer, because whether they meet in a flush depends on it alone
//   may differ     ranks may have written different things. All of them called a copy into their
//                  shares, and each decided by its own rows whether codes came along. Such a share
//                  counts as written, and ranks compare what they wrote in the next flush
//   codes current  the codes are those of the present value; their scales may be this rank's alone.
//                  A buffer with stale codes is written; the converse need not hold
//   scales synced  all ranks of the group took part in the flush, and have the same scales
//   amax known     the amaxes of the present values are at hand, left by the kernel that wrote them
//   codes final    written, with current codes and known amaxes: the flush only exchanges amaxes
//   speculative    codes that fused AdamW made by the scales before its step. They are final if the
//                  amaxes that ranks agree on give the same scales
//   generation     the grid that the codes belong to. Codes move as bytes only within a generation

/// How ranks may differ until they meet. A tensor made of a share carries this along, so that all
/// ranks know it or none.
struct MayDiffer {
  bool in_writes = false;
  /// The codes are current here and may be stale on another rank: a rank that holds none of the
  /// rows that were written cannot tell. Such a share counts as written.
  bool in_codes = false;
  /// Whether this rank's histories, and its key of rounding, are still those from before the copy:
  /// a copy of all rows takes over the source's. A rank without rows cannot tell all from some.
  bool kept_scaling_state = false;
};

/// The part of a buffer that says what a flush has to do for it. Every transition is a member. A
/// buffer is in one of these states:
///
///   state           what holds                            what may follow
///   scales synced   the codes are current, and all        a write; a gather; copies as bytes
///                   ranks have their scales
///   codes current   the codes are current, and other      the same; the next flush of all ranks,
///                   ranks may not know their scales; a    which quantizes again, or only
///                   pending write may be kept for the     exchanges the amaxes where the codes
///                   flush to come                         are final
///   codes stale     the master or the pending write has   a flush. No gather and no read of codes
///                   the value, and the codes are old      comes before it, except a flush of this
///                                                         rank alone
///
/// The last two count as written, and so does any state in which ranks may differ. A counter that
/// moved unseen, or memory that was exchanged, makes any state stale (WriteWatch).
class FlushState {
 public:
  FlushState() = default;
  FlushState(const FlushState&) = delete;  // copies are made by copy_of()
  FlushState& operator=(const FlushState&) = delete;

  bool is_written() const { return may_differ_.in_writes || is_written_here(); }
  /// Whether this rank knows of a write. Other ranks may know less: see is_written().
  bool is_written_here() const { return state_ != State::kScalesSynced || watch_.has_moved(); }
  const MayDiffer& may_differ() const { return may_differ_; }
  MayDiffer& may_differ() { return may_differ_; }
  bool codes_current() const { return state_ != State::kCodesStale && !watch_.has_moved(); }
  /// Whether codes are current for certain, on all ranks and on any thread.
  bool is_ready() const { return codes_current() && !may_differ_.in_codes && watch_.is_settled(); }
  bool knows_amax() const { return known_amax_.defined() && !watch_.has_moved(); }
  bool codes_final() const { return knows_amax() && codes_current(); }
  int64_t generation() const { return generation_; }
  /// The amaxes that compute_amax would find of the present values (kernels/quantize/quantize.h),
  /// or as many of them, from the first, as can be above 0. Never written: copies share it.
  const at::Tensor& known_amax() const { return known_amax_; }
  /// QuantizeTask::speculative_scale_inv of the present value; undefined where there are no such
  /// codes.
  at::Tensor speculative_scale_inv() const {
    return knows_amax() ? speculative_scale_inv_ : at::Tensor();
  }
  /// How often the value changed: what image-only copies compare.
  uint32_t writes() const { return writes_; }
  /// The stream of the last write that said so; none if one did not.
  std::optional<c10::Stream> write_stream() const;
  const FlushEvent& flushed() const { return flushed_; }
  /// Whether a CUDA graph captured what made image or grid anew: its replays do that again, and no
  /// transition says so.
  bool may_be_replayed() const { return may_be_replayed_; }

  /// The counters of the value's tensors, and its memory. What the in-place kernel that runs now
  /// said, and the operators that have returned, is said to it.
  WriteWatch& watch() { return watch_; }
  /// Whether the watched memory was exchanged, so that its bytes are unknown. If it was, a new
  /// generation begins, which is stale.
  bool notice_other_memory();

  /// The value was written on the device's current stream.
  void write(at::Device device);
  /// The same by a kernel that left the amaxes of the new values, and, if `codes_current`, their
  /// image, or else perhaps codes by `speculative_scale_inv` (QuantizeTask::speculative_scale_inv).
  void write_with_amax(at::Device device, at::Tensor amax, at::Tensor speculative_scale_inv,
                       bool codes_current);
  /// Some rank wrote, or may have written: this rank's codes stay, and the next flush syncs scales.
  void mark_remote_write();
  /// Makes readers wait for a flush, though the codes are those of the value.
  void invalidate_codes() { state_ = State::kCodesStale; }
  /// Kernels before `flushed` made the image from the value.
  void requantize(FlushEvent flushed);
  /// The codes are those of the value, by scales that other ranks may not know. `amax` is that of
  /// the present values, if known.
  void mark_codes_current(at::Tensor amax = {});
  /// The codes are those of the value, and all ranks have the same scales.
  void mark_scales_synced();
  /// Rows of the value and their codes, of one generation with these, were replaced as bytes.
  void replace_rows(const FlushState& from, bool same_amax);
  /// The codes, or the grid beside them, are others, of no known origin.
  void replace_codes() {
    start_generation();
    forget_amax();
  }
  /// The codes are of `generation`, as those of a template's zeros are, or gathered ones.
  void join(int64_t generation) { generation_ = generation; }
  /// Takes the state of a buffer whose value and image were copied. `same_amax`: the amaxes of the
  /// copied values are those of the source.
  void copy_of(const FlushState& other, bool same_amax, at::Device device);
  /// Restores the state that a file or a template has. `codes_current` matters if it was written.
  void restore(bool written, bool codes_current, MayDiffer may_differ = {});
  void release();

 private:
  enum class State : uint8_t { kScalesSynced, kCodesCurrent, kCodesStale };

  static int64_t next_generation();
  void start_generation() {
    generation_ = next_generation();
    speculative_scale_inv_.reset();
  }
  void forget_amax() {
    known_amax_.reset();
    speculative_scale_inv_.reset();
  }
  /// Counts as written from now on; the codes stay current or stale.
  void leave_scales_synced() {
    if (state_ == State::kScalesSynced) state_ = State::kCodesCurrent;
  }
  static State state_of(bool written, bool codes_current) {
    return !written        ? State::kScalesSynced
           : codes_current ? State::kCodesCurrent
                           : State::kCodesStale;
  }

  State state_ = State::kScalesSynced;
  MayDiffer may_differ_;
  uint32_t writes_ = 0;
  int64_t generation_ = next_generation();
  at::Tensor known_amax_;
  at::Tensor speculative_scale_inv_;  // undefined without speculative codes
  WriteWatch watch_;
  std::optional<c10::Stream> write_stream_;
  FlushEvent flushed_;
  bool may_be_replayed_ = false;  // for good: graphs are replayed at any time
};

/// A counter that moved unseen becomes a write that is known. A copy of the buffer made after this
/// has what was written, and so misses only the writes that come later.
void notice_unseen_write(FlushState& state, at::Device device);

}  // namespace qshard
