#include "dispatch/write_watch.h"

namespace qshard {

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

void WriteWatch::add_sole(const c10::TensorImpl& owner) {
  counters_.push_back({{}, &owner, owner.version_counter().current_version(), false});
}

bool WriteWatch::hold() {
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

void WriteWatch::note_before_bump() {
  note();
  for (Watched& watched : counters_) watched.bump_follows = true;
}

}  // namespace qshard
