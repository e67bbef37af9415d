#include "dispatch/parts/version_counters.h"

namespace qshard {

void VersionCounters::share_with(c10::TensorImpl& tensor) const {
  if (!keeps_master_) return;
  const bool has_master = planes_.master().defined();
  if (tensor.is_inference()) {  // it has none; aliases of the master share the master's own
    if (!watch_.is_empty() || !has_master) return;
    const c10::VariableVersion& counter = planes_.version_counter();
    if (counter.enabled()) watch_.add(counter, planes_.master_impl());
    return;
  }
  if (watch_.is_empty()) return watch_.watch_in_place(tensor);
  share();
  tensor.set_version_counter(watch_.counter());
}

void VersionCounters::bind_master() const {
  if (!planes_.master().defined() || watch_.is_empty()) return;
  watch_.own_counter();
  planes_.set_master_counter(watch_.counter());
}

void VersionCounters::watch(const c10::TensorImpl& tensor) const {
  const c10::VariableVersion& counter = tensor.version_counter();
  if (!keeps_master_ || !counter.enabled()) return;
  share();
  const bool is_first = watch_.is_empty();
  watch_.add(counter, &tensor);
  if (is_first) bind_master();
}

}  // namespace qshard
