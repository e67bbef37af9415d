// QuantizedTensorImpl: what Python and autograd see. A strided window of a QuantizedBuffer.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/TensorImpl.h>

#include <optional>
#include <vector>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// The dispatch key of quantized tensors. No CPU or CUDA backend bit: with one, torch would take
/// `x.data = q` for two tensors of one kind and mix up their representations.
constexpr c10::DispatchKey kKey = c10::DispatchKey::PrivateUse3;

/// Sizes, strides and storage_offset index a dense `rows x cols` buffer of nominal-dtype elements.
/// Where a master is kept that buffer is the master, and the tensor's storage: code that looks
/// at memory finds an ordinary strided tensor. Elsewhere the buffer is *virtual*: `has_storage()`
/// is false, so raw data access throws, and `storage()` has image and grid, for FSDP2 to manage.
class QuantizedTensorImpl final : public c10::TensorImpl {
 public:
  QuantizedTensorImpl(BufferPtr buffer, at::IntArrayRef sizes, at::IntArrayRef strides,
                      int64_t offset);
  /// A view: takes the key set of its source, so that views made in inference_mode of normal
  /// tensors stay normal tensors.
  QuantizedTensorImpl(BufferPtr buffer, c10::DispatchKeySet key_set, at::IntArrayRef sizes,
                      at::IntArrayRef strides, int64_t offset, bool is_export);
  /// A plain tensor, dense in `storage`, with the keys of one: become_quantized() may follow
  /// (dispatch/tensor/shard_to_be.h).
  QuantizedTensorImpl(c10::Storage storage, c10::DispatchKeySet plain_keys, at::ScalarType dtype,
                      at::IntArrayRef sizes);

  /// Null of a plain tensor.
  const BufferPtr& buffer() const { return buffer_; }
  /// Takes over another buffer, with the geometry of its tensor.
  void set_buffer(BufferPtr buffer, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);
  /// From now on this plain tensor has the key, and is `buffer` in its own geometry.
  void become_quantized(BufferPtr buffer);

  /// An export view stands for plain values: what clones or pickles it gets a plain tensor, what
  /// copies into it quantizes. DCP sees shards without a master through one.
  bool is_export() const { return is_export_; }

  /// Whether there is an address. Where there is none callers refuse to hand out a data pointer:
  /// this gives them the reason to state.
  bool has_storage() const override;
  const c10::Storage& storage() const override {
    return buffer_ ? buffer_->planes().storage() : c10::TensorImpl::storage();
  }
  const char* tensorimpl_type_name() const override { return "QuantizedTensorImpl"; }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter,
      bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& other) override;
  /// Weak references keep the tensor's own bytes of memory, not its planes.
  void release_resources() override;
  ~QuantizedTensorImpl() override;

 private:
  BufferPtr buffer_;
  bool is_export_ = false;

  /// Leaves the buffer, whose counter may be this tensor's own.
  void unwatch() const;
  template <typename Version>
  c10::intrusive_ptr<c10::TensorImpl> copy_and_detach(Version&& version_counter,
                                                      bool allow_change) const;
};

/// Whether `tensor` is one of ours. Other code can make tensors with our key (Inductor's
/// `_reinterpret_tensor` does): they have no buffer and are refused by name wherever they turn up.
bool is_quantized(const at::Tensor& tensor);

/// Whether `tensor` carries the key, ours or not.
inline bool has_key(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kKey);
}

/// @throws c10::Error if `tensor` has the key but is not a QuantizedTensorImpl.
QuantizedTensorImpl& impl_of(const at::Tensor& tensor);
inline QuantizedBuffer& buffer_of(const at::Tensor& tensor) { return *impl_of(tensor).buffer(); }

/// A tensor over a whole buffer with the given dense shape.
at::Tensor make_tensor(BufferPtr buffer, at::IntArrayRef sizes);
at::Tensor make_tensor(BufferPtr buffer, at::IntArrayRef sizes, at::IntArrayRef strides,
                       int64_t offset);
/// Another window of `self`'s buffer. @throws c10::Error if it does not lie within.
at::Tensor make_view(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                     int64_t offset);
at::Tensor make_export_view(const at::Tensor& self);

/// The elements of `plane` (rows, cols) that `self` is a window of; aliases `plane`.
at::Tensor window(const at::Tensor& plane, const at::Tensor& self);

/// Whether each dimension's step is what the ones after it span. A dimension of one element or none
/// is asked for its stride, too: shards of one tensor differ in how many rows they have, and what
/// is a window of whole rows on one rank must be one on all. So is_contiguous() does not do.
bool is_dense(const at::Tensor& self);
/// Rows of the buffer, if the tensor is a dense window of whole rows: on all ranks or on none,
/// where it is a window of a shard that shows the same columns on each.
std::optional<RowWindow> row_window(const at::Tensor& self);
/// Whether the tensor shows every live row of its buffer, densely.
bool covers_live_rows(const at::Tensor& self);
/// The rows that a tensor shows, in their order, as windows whose rows follow one another in the
/// logical tensor: one, or one of each matrix. None if it shows no whole rows.
std::vector<RowWindow> row_runs(const at::Tensor& self);

/// Dense strides of a shape.
c10::DimVector dense_strides(at::IntArrayRef sizes);

/// The value of `self` as a plain tensor of its nominal dtype; may alias the value plane.
at::Tensor value_of(const at::Tensor& self);
/// The same, never an alias.
at::Tensor value_copy(const at::Tensor& self,
                      at::MemoryFormat format = at::MemoryFormat::Contiguous);
/// value_of() a quantized tensor; a plain one itself.
inline at::Tensor value_or_itself(const at::Tensor& tensor) {
  return has_key(tensor) ? value_of(tensor) : tensor;
}

/// "float8_blockwise float32[128, 256] on cpu", or of a plain tensor "plain not contiguous Float[4]
/// on cpu", for error messages.
std::string describe(const at::Tensor& self);

/// After a kernel below ADInplaceOrView wrote `self`: bumps its version, and its buffer counts as
/// written. A window without elements changed nothing but that.
void bump_and_mark_written(const at::Tensor& self);

}  // namespace qshard
