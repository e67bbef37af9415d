// WriteWatch: notices writes by other libraries' operators, by version counters.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "dispatch/parts/storage.h"

namespace qshard {

/// The version counters of a master: of the tensor, which its views and the aliases of its master
/// share. Kernels of ours say what they write; code that writes through the address (Inductor's, an
/// in-place load through an alias) moves a counter and says nothing. A resize of a storage, which
/// leaves other bytes in it, does not even that: the memory is watched, too.
class WriteWatch {
 public:
  /// Watches one more counter, that of `owner`, from now on; in place of another one it had.
  void add(const c10::VariableVersion& counter, const c10::TensorImpl* owner);
  /// Watches the counter of a buffer's first tensor without sharing it: torch's factories
  /// (empty_like) continue with another tensor if something shares the counter of theirs. The
  /// tensor calls unwatch() before it goes.
  void watch_in_place(const c10::TensorImpl& owner);
  /// Shares that counter from now on, because others are about to. Returns whether that is new.
  bool own_counter();
  void unwatch(const c10::TensorImpl& owner) {
    if (!is_empty() && counters_.front().owner == &owner) own_counter();
  }
  bool is_empty() const { return counters_.empty(); }
  /// The counter, held, that new tensors over the buffer share; of the tensor it was made with.
  const c10::VariableVersion& counter() const { return counters_.front().counter; }

  /// Watches these storages from now on, in place of those before.
  void watch(MemoryWatch memory) { memory_ = memory; }
  /// Whether a storage got other memory since that was last noted.
  bool has_other_memory() const { return memory_.has_moved(); }

  /// The same, or whether a counter moved.
  bool has_moved() const {
    if (has_other_memory()) return true;
    for (const Watched& watched : counters_) {
      const uint32_t version = watched.version();
      if (version != watched.noted && !(watched.bump_follows && version == watched.noted + 1)) {
        return true;
      }
    }
    return false;
  }
  /// All moves so far are known.
  void note();
  /// Notes all moves so far and takes the next move of any counter for this write's:
  /// ADInplaceOrView bumps the counter after every in-place kernel. Only writes that leave the
  /// codes stale may call it, since that move may be another write's.
  void expect_version_bump();
  /// The same for `written`'s counter alone: a tensor whose counter is not watched, as that of
  /// x.data, moves no watched one.
  void expect_version_bump(const c10::TensorImpl& written);
  /// An operator that noted before its bump has returned since. The bump has come, or it never
  /// will: DTensor calls operators on local tensors below ADInplaceOrView.
  void settle() {
    if (!is_settled()) settle_bumps();
  }
  bool is_settled() const {
    for (const Watched& watched : counters_) {
      if (watched.bump_follows) return false;
    }
    return true;
  }

 private:
  struct Watched {
    c10::VariableVersion counter;  // disabled while the owner's is read where it lies
    const c10::TensorImpl* owner;  // to tell them apart; it may be gone if the counter is held
    uint32_t noted;
    bool bump_follows;

    uint32_t version() const {
      return (counter.enabled() ? counter : owner->version_counter()).current_version();
    }
  };
  c10::SmallVector<Watched, 1> counters_;
  MemoryWatch memory_;

  void settle_bumps();
};

}  // namespace qshard
