#include "dispatch/parts/write_watch.h"

#include <cstring>

namespace qshard {
namespace {

/// Whether two tensors share a counter, which c10 does not tell: what a VariableVersion holds is
/// the pointer to it.
bool is_same(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return a.enabled() && std::memcmp(&a, &b, sizeof(a)) == 0;
}

}  // namespace

void WriteWatch::add(const c10::VariableVersion& counter, const c10::TensorImpl* owner) {
  const Watched added{counter, owner, counter.current_version(), false};
  for (Watched& watched : counters_) {
    if (watched.owner == owner && &watched != counters_.begin()) {
      watched = added;
      return;
    }
  }
  counters_.push_back(added);
}

void WriteWatch::watch_in_place(const c10::TensorImpl& owner) {
  counters_.push_back({{}, &owner, owner.version_counter().current_version(), false});
}

bool WriteWatch::own_counter() {
  if (is_empty() || counters_.front().counter.enabled()) return false;
  counters_.front().counter = counters_.front().owner->version_counter();
  return true;
}

void WriteWatch::note() {
  memory_.note();
  for (Watched& watched : counters_) {
    watched.noted = watched.version();
    watched.bump_follows = false;
  }
}

void WriteWatch::expect_version_bump(const c10::TensorImpl& written) {
  note();
  for (Watched& watched : counters_) {
    const c10::VariableVersion& counter =
        watched.counter.enabled() ? watched.counter : watched.owner->version_counter();
    watched.bump_follows = is_same(counter, written.version_counter());
  }
}

void WriteWatch::settle_bumps() {
  for (Watched& watched : counters_) {
    if (!watched.bump_follows) continue;
    if (watched.version() == watched.noted + 1) ++watched.noted;
    watched.bump_follows = false;
  }
}

void WriteWatch::expect_version_bump() {
  note();
  for (Watched& watched : counters_) watched.bump_follows = true;
}

}  // namespace qshard
