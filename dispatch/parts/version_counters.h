// VersionCounters: the version counters of a buffer's tensors.
#pragma once

#include <c10/core/TensorImpl.h>

#include "dispatch/parts/planes.h"
#include "dispatch/parts/write_watch.h"

namespace qshard {

/// Tensors of a buffer with a master, their views and the aliases of the master share one counter,
/// which is watched for writes through the address. Tensors of a buffer without a master have no
/// address, and counters of their own.
class VersionCounters {
 public:
  VersionCounters(Planes& planes, WriteWatch& watch, bool keeps_master)
      : planes_(planes), watch_(watch), keeps_master_(keeps_master) {}

  /// Lets a new tensor share the counter.
  void share_with(c10::TensorImpl& tensor) const;
  /// Before a view or an alias shares the counter of a tensor of the buffer.
  void share() const {
    if (watch_.own_counter()) bind_master();
  }
  /// Watches the counter of a tensor that took this buffer over and kept its own (x.data = q).
  void watch(const c10::TensorImpl& tensor) const;
  /// A master that the buffer did not have before shares the counter, too.
  void bind_master() const;
  /// The counter of tensors that show codes or scales. An in-place operator on them writes, beside
  /// a master, the tensor, whose codes are then made anew; else codes or scales, which are the
  /// value.
  const c10::VariableVersion& of_codes() const {
    share();
    return planes_.version_counter();
  }

 private:
  Planes& planes_;
  WriteWatch& watch_;
  bool keeps_master_;
};

}  // namespace qshard
