// FlushState: whether the image shows the value, and who knows.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "dispatch/streams.h"
#include "dispatch/write_watch.h"

namespace qshard {

// Glossary
//
//   written     since the last flush that all ranks of its group took part in. Equal on all ranks:
//               whether they meet in a flush depends on it alone
//   shown       the image shows the present value, by scales that may be this rank's alone. A local
//               matter: what is not shown is written, not the reverse
//   agreed      said of a flush: all ranks of the group took part, and the scales are theirs
//   amax known  the amaxes of the present values are at hand, left by what wrote or rounded them
//   settled     written and shown with known amaxes: the codes are final, and of the flush to come
//               only the exchange of amaxes is left
//   provisional said of codes: of the present value with known amaxes, by the scales before it;
//               final if the amaxes that ranks agree on give the same ones
//   generation  which grid the codes belong to. Codes move as bytes within one generation only

/// The part of a buffer that says what a flush has to do for it. Every transition is a member.
class FlushState {
 public:
  FlushState() = default;
  FlushState(const FlushState&) = delete;  // copies are made by copy_of()
  FlushState& operator=(const FlushState&) = delete;

  bool is_written() const { return written_ || watch_.has_moved(); }
  bool is_shown() const { return shown_ && !watch_.has_moved(); }
  bool is_settled_and_shown() const { return is_shown() && watch_.is_settled(); }
  bool knows_amax() const { return known_amax_.defined() && !watch_.has_moved(); }
  bool is_settled() const { return knows_amax() && is_shown(); }
  int64_t generation() const { return generation_; }
  /// The amaxes that compute_amax would find of the present values (kernels/quantize.h), or as many
  /// of them, from the first, as can be above 0. Never written: copies share it.
  const at::Tensor& known_amax() const { return known_amax_; }
  /// QuantizeTask::provisional of the present value; undefined where there are no such codes.
  at::Tensor provisional() const { return knows_amax() ? provisional_ : at::Tensor(); }
  /// How often the value changed: what image-only copies compare.
  uint32_t writes() const { return writes_; }
  bool was_written_unseen() const { return watch_.has_moved(); }
  /// The stream of the last write that said so; none if one did not.
  std::optional<c10::Stream> write_stream() const;
  const FlushEvent& flushed() const { return flushed_; }
  /// Whether a CUDA graph captured what made image or grid anew: its replays do that again, and no
  /// transition says so.
  bool may_be_replayed() const { return may_be_replayed_; }

  /// Watches a version counter of the master, that of `owner`.
  void watch(const c10::VariableVersion& counter, const c10::TensorImpl* owner) {
    watch_.add(counter, owner);
  }
  /// The same of the buffer's first tensor, which nobody shares it with yet.
  void watch_sole(const c10::TensorImpl& owner) { watch_.add_sole(owner); }
  /// Watches the memory of value and codes; what it held before is forgotten.
  void watch_memory(MemoryWatch memory) { watch_.watch(memory); }
  /// Whether the watched memory was exchanged, so that its bytes are unknown. If it was, a new
  /// generation begins, which is written and not shown.
  bool notice_other_memory();
  /// Before others share it; whether they are the first.
  bool hold_counter() { return watch_.hold(); }
  /// The tensor goes, or leaves the buffer; what was watched stays so.
  void let_go(const c10::TensorImpl& owner) { watch_.let_go(owner); }
  bool is_watched() const { return !watch_.is_empty(); }
  const c10::VariableVersion& version_counter() const { return watch_.counter(); }

  /// The value was written on the device's current stream.
  void write(at::Device device);
  /// The same by a kernel that left the amaxes of the new values, and, if `shown`, their image, or
  /// else perhaps codes by `provisional` (QuantizeTask::provisional).
  void write_with_amax(at::Device device, at::Tensor amax, at::Tensor provisional, bool shown);
  /// Some rank wrote, or may have: the image stands, and its scales are to be agreed on again.
  void write_elsewhere();
  /// The image is not to be read before a flush, though the value is the one that it was made of.
  void hide() { shown_ = false; }
  /// The image was made anew from the value, by kernels that `flushed` comes after.
  void requantize(FlushEvent flushed);
  /// The image shows the value, by scales that other ranks may not know. `amax` is that of the
  /// values as they are now, if known.
  void show(at::Tensor amax);
  /// The image shows the value, and all ranks know.
  void agree();
  /// Rows of the value and their codes, of one generation with these, were replaced as bytes.
  void replace_rows(bool written, bool same_amax);
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
  /// As it was when a file was written, or a template read.
  void restore(bool written, bool shown);
  /// The in-place kernel that runs now has said all; the bump that follows says nothing new.
  void note_before_bump() { watch_.note_before_bump(); }
  void note_before_bump(const c10::TensorImpl& written) { watch_.note_before_bump(written); }
  /// Operators that noted before a bump have returned since.
  void settle_bumps() {
    if (!watch_.is_settled()) watch_.settle();
  }
  void release();

  static int64_t next_generation();

 private:
  void start_generation() {
    generation_ = next_generation();
    provisional_.reset();
  }
  void forget_amax() {
    known_amax_.reset();
    provisional_.reset();
  }

  bool written_ = false;
  bool shown_ = true;
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
