// FlushState: whether the image shows the value, and who knows.
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
//   written     since the last flush that all ranks of its group took part in. Equal on all ranks:
//               whether they meet in a flush depends on it alone
//   may differ  ranks may differ in what was written. All of them have called a copy into their
//               shares; whether it took codes along, each rank decided by the rows that it has. It
//               counts as written, and ranks tell one another in the next flush
//   shown       the image shows the present value, by scales that may be this rank's alone. A local
//               matter: what is not shown is written, not the reverse
//   agreed      said of a flush: all ranks of the group took part, and the scales are theirs
//   amax known  the amaxes of the present values are at hand, left by what wrote or rounded them
//   settled     written and shown with known amaxes: the codes are final, and of the flush to come
//               only the exchange of amaxes is left
//   provisional said of codes: of the present value with known amaxes, by the scales before it;
//               final if the amaxes that ranks agree on give the same ones
//   generation  which grid the codes belong to. Codes move as bytes within one generation only

/// In what ranks may differ until they meet. Whatever is made of a share carries it along, so that
/// all ranks know it or none.
struct MayDiffer {
  bool in_writes = false;
  /// Whether this rank's histories, and its key of rounding, are still those from before the copy:
  /// a copy of all rows takes over the source's. A rank without rows cannot tell all from some.
  bool kept_scaling_state = false;
};

/// The part of a buffer that says what a flush has to do for it. Every transition is a member. A
/// buffer is in one of these states:
///
///   state    what holds                                  what may follow
///   agreed   the image shows the value, and all ranks    a write; a gather; copies as bytes
///            know its scales
///   shown    the image shows the value, by scales that   the same; the next agreed flush, which
///            other ranks may not know; a pending write   quantizes again, or agrees on amaxes
///            may be kept for the flush to come           alone where they are known (settled)
///   stale    the image is old: master or pending write   a flush: no gather and no read of codes
///            has the value                               comes before it, but by a flush of this
///                                                        rank alone
///
/// `shown` and `stale` count as written, and so does any state in which ranks may differ. A counter
/// that moved unseen, or memory that was exchanged, makes any state stale (WriteWatch).
class FlushState {
 public:
  FlushState() = default;
  FlushState(const FlushState&) = delete;  // copies are made by copy_of()
  FlushState& operator=(const FlushState&) = delete;

  bool is_written() const { return may_differ_.in_writes || is_written_here(); }
  /// Whether this rank knows of a write. Other ranks may know less: see is_written().
  bool is_written_here() const { return state_ != State::kAgreed || watch_.has_moved(); }
  const MayDiffer& may_differ() const { return may_differ_; }
  MayDiffer& may_differ() { return may_differ_; }
  bool is_shown() const { return state_ != State::kStale && !watch_.has_moved(); }
  /// Whether it is shown, for sure and on any thread.
  bool is_ready() const { return is_shown() && watch_.is_settled(); }
  bool knows_amax() const { return known_amax_.defined() && !watch_.has_moved(); }
  bool is_settled() const { return knows_amax() && is_shown(); }
  int64_t generation() const { return generation_; }
  /// The amaxes that compute_amax would find of the present values (kernels/quantize/quantize.h),
  /// or as many of them, from the first, as can be above 0. Never written: copies share it.
  const at::Tensor& known_amax() const { return known_amax_; }
  /// QuantizeTask::provisional of the present value; undefined where there are no such codes.
  at::Tensor provisional() const { return knows_amax() ? provisional_ : at::Tensor(); }
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
  /// The same by a kernel that left the amaxes of the new values, and, if `shown`, their image, or
  /// else perhaps codes by `provisional` (QuantizeTask::provisional).
  void write_with_amax(at::Device device, at::Tensor amax, at::Tensor provisional, bool shown);
  /// Some rank wrote, or may have: the image stands, and its scales are to be agreed on again.
  void write_elsewhere();
  /// A written value's image is not to be read before a flush, though the value is the one that it
  /// was made of.
  void hide() { state_ = State::kStale; }
  /// The image was made anew from the value, by kernels that `flushed` comes after.
  void requantize(FlushEvent flushed);
  /// The image shows the value, by scales that other ranks may not know. `amax` is that of the
  /// values as they are now, if known.
  void show(at::Tensor amax = {});
  /// The image shows the value, and all ranks know.
  void agree();
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
  /// As it was when a file was written, or a template read: `shown` of what was written.
  void restore(bool written, bool shown, MayDiffer may_differ = {});
  void release();

 private:
  enum class State : uint8_t { kAgreed, kShown, kStale };

  static int64_t next_generation();
  void start_generation() {
    generation_ = next_generation();
    provisional_.reset();
  }
  void forget_amax() {
    known_amax_.reset();
    provisional_.reset();
  }
  /// Written from now on; shown as it was.
  void leave_agreed() {
    if (state_ == State::kAgreed) state_ = State::kShown;
  }
  static State state_of(bool written, bool shown) {
    return !written ? State::kAgreed : shown ? State::kShown : State::kStale;
  }

  State state_ = State::kAgreed;
  MayDiffer may_differ_;
  uint32_t writes_ = 0;
  int64_t generation_ = next_generation();
  at::Tensor known_amax_;
  at::Tensor provisional_;  // undefined where codes are none
  WriteWatch watch_;
  std::optional<c10::Stream> write_stream_;
  FlushEvent flushed_;
  bool may_be_replayed_ = false;  // for good: graphs are replayed at any time
};

}  // namespace qshard
