// Storages, plain tensors in them and byte copies, without the dispatcher: FSDP2 makes and moves
// buffers per parameter, and an aten call costs more host time than its memset or memcpy.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace qshard {

enum class Fill { kNothing, kZeros };

/// A resizable storage, whose resizes are watched (MemoryWatch), of `bytes` on cpu, cuda or meta,
/// in pinned memory of the host if `pinned`; zeros are written on the device's current stream.
c10::Storage allocate_storage(int64_t bytes, at::Device device, Fill fill, bool pinned = false);

/// Starts to watch the resizes of a storage that other code allocated. A storage that cannot be
/// resized is left as it is.
void watch_resizes(const c10::Storage& storage);

/// Notices that one of two storages got other memory. FSDP and sleeping inference engines free
/// storages by resize_(0) and later resize them back: the bytes then are of no known origin, and
/// often lie at the same address.
///
/// A watched storage has an allocator that counts (dispatch/parts/storage.cpp), because torch asks
/// a storage's allocator for memory in a resize and at no other time.
class MemoryWatch {
 public:
  MemoryWatch() = default;
  /// Watches two storages from now on, as long as both live. It ignores a storage without an
  /// allocator that counts.
  MemoryWatch(const c10::Storage& first, const c10::Storage& second);

  bool has_moved() const {
    return noted_ != resizes.load(std::memory_order_relaxed) && was_resized();
  }
  void note() { noted_ = resizes.load(std::memory_order_relaxed); }

 private:
  static std::atomic<uint64_t> resizes;  // how many all watched storages had so far
  std::array<const c10::StorageImpl*, 2> storages_{};
  mutable uint64_t noted_ = 0;  // resizes up to this count were looked at

  bool was_resized() const;
  friend class CountingAllocator;
};

/// A contiguous plain tensor in a storage.
at::Tensor tensor_at(const c10::Storage& storage, at::ScalarType dtype, int64_t byte_offset,
                     at::IntArrayRef sizes);

/// Copies bytes within `device`, on its current stream.
void copy_on_device(void* to, const void* from, int64_t bytes, at::Device device);

}  // namespace qshard
