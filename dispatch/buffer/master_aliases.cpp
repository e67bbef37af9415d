#include "dispatch/buffer/master_aliases.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

namespace qshard {
namespace {

using WeakBuffer = c10::weak_intrusive_ptr<QuantizedBuffer>;

/// Buffers by the storage of their master. The references are weak, because a buffer may go while
/// its alias stays. add() drops dead entries when the map has doubled since it last did so.
class Registry {
 public:
  void add(const BufferPtr& buffer) {
    const std::lock_guard lock(mutex_);
    entries_.insert_or_assign(storage_of(*buffer), WeakBuffer(buffer));
    if (entries_.size() > limit_) {
      std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
      limit_ = std::max(2 * entries_.size(), kLeast);
    }
    is_empty_ = false;
  }

  BufferPtr find(const c10::StorageImpl* storage) {
    if (is_empty_) return {};  // every collective asks
    const std::lock_guard lock(mutex_);
    const auto entry = entries_.find(storage);
    if (entry == entries_.end()) return {};
    BufferPtr buffer = entry->second.lock();
    // set_() may have given it another master since.
    return buffer && storage_of(*buffer) == storage ? buffer : BufferPtr();
  }

 private:
  static constexpr size_t kLeast = 1024;
  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, WeakBuffer> entries_;
  size_t limit_ = kLeast;
  std::atomic<bool> is_empty_ = true;

  static const c10::StorageImpl* storage_of(const QuantizedBuffer& buffer) {
    const ReadOnlyTensor& master = buffer.planes().master();
    return master.defined() ? master.storage_impl() : nullptr;
  }
};

Registry& registry() {
  static auto* const registry = new Registry;  // never destroyed: threads of c10d may outlive main
  return *registry;
}

}  // namespace

void note_master_alias(const BufferPtr& buffer) { registry().add(buffer); }

BufferPtr owner_of_master_alias(const at::Tensor& plain) {
  return plain.has_storage() ? registry().find(plain.storage().unsafeGetStorageImpl())
                             : BufferPtr();
}

}  // namespace qshard
