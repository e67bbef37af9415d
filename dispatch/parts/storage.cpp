#include "dispatch/parts/storage.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <unordered_map>

#include "kernels/device/memory.h"

namespace qshard {

std::atomic<uint64_t> MemoryWatch::resizes{0};

/// Another allocator, and a note of what it handed out when. Only resizes ask it: storages are made
/// with memory of the other one.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* base) : base_(base) {}

  /// The one over `base`; of itself, itself. It lives as long as the process, as allocators do.
  static c10::Allocator* over(c10::Allocator* base) {
    static std::mutex mutex;
    static auto& known = *new std::map<c10::Allocator*, std::unique_ptr<CountingAllocator>>;
    if (is_one(base)) return base;
    const std::lock_guard lock(mutex);
    auto& allocator = known[base];
    if (!allocator) allocator = std::make_unique<CountingAllocator>(base);
    return allocator.get();
  }
  static bool is_one(const c10::Allocator* allocator) {
    return allocator != nullptr && typeid(*allocator) == typeid(CountingAllocator);
  }

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = base_->allocate(bytes);
    if (!data) return data;
    const std::lock_guard lock(handed_out().mutex);
    handed_out().at[data.get()] = ++MemoryWatch::resizes;
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return base_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    base_->copy_data(to, from, bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return base_->is_simple_data_ptr(data);
  }

  /// The count of resizes when this address was last handed out; 0: never. A storage that has the
  /// memory there now, and had it before that count, was resized in between.
  static uint64_t last_handed_out(const void* address) {
    const std::lock_guard lock(handed_out().mutex);
    const auto found = handed_out().at.find(address);
    return found == handed_out().at.end() ? 0 : found->second;
  }

 private:
  struct HandedOut {
    std::mutex mutex;
    std::unordered_map<const void*, uint64_t> at;
  };
  static HandedOut& handed_out() {
    static auto& table = *new HandedOut;
    return table;
  }

  c10::Allocator* base_;
};

void watch_resizes(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  if (!impl->resizable() || impl->allocator() == nullptr) return;
  impl->set_allocator(CountingAllocator::over(impl->allocator()));
}

MemoryWatch::MemoryWatch(const c10::Storage& first, const c10::Storage& second) {
  const auto watched = [](const c10::Storage& storage) -> const c10::StorageImpl* {
    return CountingAllocator::is_one(storage.allocator()) ? storage.unsafeGetStorageImpl()
                                                          : nullptr;
  };
  storages_ = {watched(first), watched(second)};
  note();
}

bool MemoryWatch::was_resized() const {
  const uint64_t now = resizes.load(std::memory_order_relaxed);
  for (const c10::StorageImpl* storage : storages_) {
    if (storage && CountingAllocator::last_handed_out(storage->data()) > noted_) return true;
  }
  noted_ = now;
  return false;
}

namespace {

constexpr int64_t kGrainBytes = 1 << 20;  // below, one thread

c10::Storage storage_from(c10::Allocator* allocator, int64_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes),
                      CountingAllocator::over(allocator), /*resizable=*/true);
}

c10::Storage allocate_on_cpu(int64_t bytes, Fill fill) {
  auto storage = storage_from(c10::GetCPUAllocator(), bytes);
  auto* data = static_cast<uint8_t*>(storage.mutable_data());
  if (fill == Fill::kZeros) {
    at::parallel_for(0, bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
      std::memset(data + begin, 0, end - begin);
    });
  }
  return storage;
}

}  // namespace

c10::Storage allocate_storage(int64_t bytes, at::Device device, Fill fill, bool pinned) {
  if (pinned) {
    auto flat = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    if (fill == Fill::kZeros) flat.zero_();
    watch_resizes(flat.storage());
    return flat.storage();
  }
  if (device.is_cpu()) return allocate_on_cpu(bytes, fill);
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    auto storage = storage_from(cuda::allocator(), bytes);
    if (fill == Fill::kZeros && bytes > 0) cuda::zero(storage.mutable_data(), bytes, device);
    return storage;
  }
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device)).storage();
}

at::Tensor tensor_at(const c10::Storage& storage, at::ScalarType dtype, int64_t byte_offset,
                     at::IntArrayRef sizes) {
  const auto device = storage.device();
  const auto key = device.is_meta()   ? c10::DispatchKey::Meta
                   : device.is_cuda() ? c10::DispatchKey::CUDA
                                      : c10::DispatchKey::CPU;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_storage_offset(byte_offset /
                                                   static_cast<int64_t>(c10::elementSize(dtype)));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

void copy_on_device(void* to, const void* from, int64_t bytes, at::Device device) {
  if (bytes == 0) return;
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    return cuda::copy(to, from, bytes, device);
  }
  TORCH_INTERNAL_ASSERT(device.is_cpu());
  at::parallel_for(0, bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<uint8_t*>(to) + begin, static_cast<const uint8_t*>(from) + begin,
                end - begin);
  });
}

}  // namespace qshard
