// ReadOnlyTensor: a plain tensor that its holder reads and cannot write.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <utility>

namespace qshard {

/// torch has no tensor that cannot be written: a `const at::Tensor&` can be. This has what reads
/// ask for, under the names that at::Tensor gives them, and no writable pointer.
class ReadOnlyTensor {
 public:
  ReadOnlyTensor() = default;
  /// Implicit: code that may write a tensor may let others read it.
  ReadOnlyTensor(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  bool defined() const { return tensor_.defined(); }
  const void* const_data_ptr() const { return tensor_.const_data_ptr(); }
  template <typename T>
  const T* const_data_ptr() const {
    return tensor_.const_data_ptr<T>();
  }

  at::IntArrayRef sizes() const { return tensor_.sizes(); }
  int64_t numel() const { return tensor_.numel(); }
  int64_t nbytes() const { return static_cast<int64_t>(tensor_.nbytes()); }
  at::ScalarType scalar_type() const { return tensor_.scalar_type(); }
  at::TensorOptions options() const { return tensor_.options(); }
  at::Device device() const { return tensor_.device(); }
  bool is_contiguous() const { return tensor_.is_contiguous(); }
  bool is_pinned() const { return tensor_.is_pinned(); }
  bool is_alias_of(const at::Tensor& other) const { return tensor_.is_alias_of(other); }
  /// Whether its storage has `bytes` bytes from the first element on: it may have been freed.
  bool has_memory(int64_t bytes) const {
    const auto begin = tensor_.storage_offset() * static_cast<int64_t>(tensor_.element_size());
    return static_cast<int64_t>(tensor_.storage().nbytes()) >= begin + bytes;
  }
  const c10::StorageImpl* storage_impl() const { return tensor_.storage().unsafeGetStorageImpl(); }
  void record_stream(c10::Stream stream) const { tensor_.record_stream(stream); }

  ReadOnlyTensor view(at::IntArrayRef sizes) const { return tensor_.view(sizes); }
  ReadOnlyTensor narrow(int64_t dim, int64_t start, int64_t length) const {
    return tensor_.narrow(dim, start, length);
  }
  /// The same tensor as an argument that an operator of torch reads. The caller writes nothing to
  /// it and gives it to nothing that might.
  at::Tensor operand() const { return tensor_; }

 protected:
  at::Tensor tensor_;
};

}  // namespace qshard
