#include "dispatch/tensor/write_scope.h"

#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"

namespace qshard {

WriteScope::WriteScope(const at::Tensor& tensor) : tensor_(tensor) {
  const QuantizedBuffer& buffer = buffer_of(tensor);
  makes_pending_ = !buffer.keeps_master() && !buffer.planes().pending().defined();
}

at::Tensor WriteScope::plane() const {
  if (tensor_.numel() == 0) {
    return at::empty(tensor_.sizes(),
                     at::TensorOptions().dtype(tensor_.dtype()).device(tensor_.device()));
  }
  return window(buffer_of(tensor_).write_plane(), tensor_);
}

at::Tensor WriteScope::whole_plane() const {
  if (tensor_.numel() == 0) return plane();
  const at::Tensor written = buffer_of(tensor_).write_plane();
  const bool is_whole = tensor_.sizes() == written.sizes() && tensor_.is_contiguous();
  return is_whole ? written : window(written, tensor_);
}

void* WriteScope::data() const {
  const at::Tensor written = buffer_of(tensor_).write_plane();
  return static_cast<char*>(written.mutable_data_ptr()) +
         tensor_.storage_offset() * static_cast<int64_t>(written.element_size());
}

void WriteScope::commit() const { bump_and_mark_written(tensor_); }

void WriteScope::commit_before_bump() const {
  QuantizedBuffer& buffer = buffer_of(tensor_);
  tensor_.numel() == 0 ? buffer.mark_empty_write(*tensor_.unsafeGetTensorImpl()) : buffer.written();
}

void WriteScope::roll_back(bool may_have_written) const {
  QuantizedBuffer& buffer = buffer_of(tensor_);
  if (makes_pending_) {  // of two windows of one buffer the first did, for both
    buffer.drop_pending();
  } else if (may_have_written && (buffer.keeps_master() || buffer.planes().pending().defined())) {
    buffer.written();
  }
}

void WriteScope::written_by_alias(QuantizedBuffer& buffer) {
  buffer.write_plane();
  buffer.written();
  c10::VariableVersion counter = buffer.counters().of_codes();
  if (counter.enabled()) counter.bump();
}

}  // namespace qshard
