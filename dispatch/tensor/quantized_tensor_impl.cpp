#include "dispatch/tensor/quantized_tensor_impl.h"

#include <c10/util/safe_numerics.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <typeinfo>
#include <utility>

#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/python_part.h"

namespace qshard {

QuantizedTensorImpl::QuantizedTensorImpl(BufferPtr buffer, at::IntArrayRef sizes,
                                         at::IntArrayRef strides, int64_t offset)
    : c10::TensorImpl(c10::Storage(buffer->planes().storage()), c10::DispatchKeySet(kKey),
                      c10::scalarTypeToTypeMeta(buffer->dtype())),
      buffer_(std::move(buffer)) {
  set_sizes_and_strides(sizes, strides);
  set_storage_offset(offset);
}

QuantizedTensorImpl::QuantizedTensorImpl(BufferPtr buffer, c10::DispatchKeySet key_set,
                                         at::IntArrayRef sizes, at::IntArrayRef strides,
                                         int64_t offset, bool is_export)
    : c10::TensorImpl(c10::TensorImpl::VIEW, c10::Storage(buffer->planes().storage()), key_set,
                      c10::scalarTypeToTypeMeta(buffer->dtype())),
      buffer_(std::move(buffer)),
      is_export_(is_export) {
  set_sizes_and_strides(sizes, strides);
  set_storage_offset(offset);
}

QuantizedTensorImpl::QuantizedTensorImpl(c10::Storage storage, c10::DispatchKeySet plain_keys,
                                         at::ScalarType dtype, at::IntArrayRef sizes)
    : c10::TensorImpl(std::move(storage), plain_keys, c10::scalarTypeToTypeMeta(dtype)) {
  set_sizes_contiguous(sizes);
}

void QuantizedTensorImpl::become_quantized(BufferPtr buffer) {
  const auto like = c10::make_intrusive<QuantizedTensorImpl>(buffer, sizes(), strides(), 0);
  key_set_ = like->key_set_;
  storage_ = buffer->planes().storage();
  buffer_ = std::move(buffer);
  buffer_->counters().watch(*this);
}

void QuantizedTensorImpl::set_buffer(BufferPtr buffer, at::IntArrayRef sizes,
                                     at::IntArrayRef strides, int64_t offset) {
  unwatch();
  buffer_ = std::move(buffer);
  storage_ = buffer_->planes().storage();
  data_type_ = c10::scalarTypeToTypeMeta(buffer_->dtype());
  set_sizes_and_strides(sizes, strides, offset);
  buffer_->counters().watch(*this);
}

QuantizedTensorImpl::~QuantizedTensorImpl() { unwatch(); }

void QuantizedTensorImpl::unwatch() const {
  if (buffer_) buffer_->flush_state().watch().unwatch(*this);
}

void QuantizedTensorImpl::release_resources() {
  unwatch();
  buffer_.reset();
  c10::TensorImpl::release_resources();
}

bool QuantizedTensorImpl::has_storage() const {
  if (!buffer_) return c10::TensorImpl::has_storage();
  if (buffer_->planes().master().defined()) return true;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!extra_meta_) {
    auto meta = std::make_unique<c10::ExtraMeta>();
    meta->custom_data_ptr_error_msg_ = fmt::format(
        "qshard: Cannot access data pointer of a quantized tensor without a master: the bytes of "
        "{} are codes and scales, not {} values. In the Trainer of transformers quantize by "
        "qshard.integrations.transformers.QuantizeCallback; accelerate's FSDP2 needs addresses, so "
        "that quantize_ comes after its prepare(). Elsewhere use qshard::dequantize(tensor); "
        "compiled code needs that and fused optimizers (torch.optim.AdamW(..., fused=True))",
        buffer_->layout().format->name, c10::toString(buffer_->dtype()));
    const_cast<QuantizedTensorImpl*>(this)->extra_meta_ = std::move(meta);
  }
  return false;
}

template <typename Version>
c10::intrusive_ptr<c10::TensorImpl> QuantizedTensorImpl::copy_and_detach(Version&& version_counter,
                                                                         bool allow_change) const {
  buffer_->counters().share();
  auto copy =
      c10::make_intrusive<QuantizedTensorImpl>(buffer_, sizes(), strides(), storage_offset());
  copy->key_set_ = key_set_;
  copy->is_export_ = is_export_;
  // As of a plain tensor, one of an inference tensor has a counter of its own, and may be written.
  if (!copy->is_inference()) copy->set_version_counter(std::forward<Version>(version_counter));
  copy->set_allow_tensor_metadata_change(allow_change);
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> QuantizedTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter, bool allow_tensor_metadata_change) const {
  if (!buffer_) {
    return TensorImpl::shallow_copy_and_detach(version_counter, allow_tensor_metadata_change);
  }
  return copy_and_detach(version_counter, allow_tensor_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> QuantizedTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const {
  if (!buffer_) {
    return TensorImpl::shallow_copy_and_detach(std::move(version_counter),
                                               allow_tensor_metadata_change);
  }
  return copy_and_detach(std::move(version_counter), allow_tensor_metadata_change);
}

void QuantizedTensorImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& other) {
  if (!buffer_) return c10::TensorImpl::shallow_copy_from(other);
  TORCH_CHECK(
      other->key_set().has(kKey) && typeid(*other) == typeid(QuantizedTensorImpl),
      "qshard: a quantized tensor cannot take over the data of a plain tensor; use copy_(), "
      "or assign a new Parameter");
  auto* source = static_cast<QuantizedTensorImpl*>(other.get());
  copy_tensor_metadata(source, this, version_counter(), allow_tensor_metadata_change());
  unwatch();
  buffer_ = source->buffer_;
  is_export_ = source->is_export_;
  storage_ = buffer_->planes().storage();
  buffer_->counters().watch(*this);
}

bool is_quantized(const at::Tensor& tensor) {
  return has_key(tensor) && typeid(*tensor.unsafeGetTensorImpl()) == typeid(QuantizedTensorImpl);
}

namespace {

[[noreturn]] void refuse_other(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(has_key(tensor), "qshard: expected a quantized tensor, got ", describe(tensor));
  TORCH_CHECK(
      false,
      fmt::format("qshard: a tensor carries the quantized dispatch key ({}) but is not a quantized "
                  "tensor; a compiler or another library reinterpreted one. Compile without "
                  "Inductor's cpp_wrapper, or call the operator outside of compiled code "
                  "(torch.compiler.disable)",
                  c10::toString(kKey)));
}

}  // namespace

QuantizedTensorImpl& impl_of(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!has_key(tensor) || typeid(*impl) != typeid(QuantizedTensorImpl)) refuse_other(tensor);
  return static_cast<QuantizedTensorImpl&>(*impl);
}

c10::DimVector dense_strides(at::IntArrayRef sizes) {
  c10::DimVector strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

at::Tensor make_tensor(BufferPtr buffer, at::IntArrayRef sizes, at::IntArrayRef strides,
                       int64_t offset) {
  need_python_part();
  auto tensor = at::detail::make_tensor<QuantizedTensorImpl>(buffer, sizes, strides, offset);
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  buffer->counters().share_with(impl);
  // Rows that travel are views of one memory with row_image(): what is saved for backward notices
  // that they are written by it.
  if (has_rows_of_their_own(*buffer) && !impl.is_inference()) {
    impl.set_version_counter(buffer->counters().of_codes());
  }
  return tensor;
}

at::Tensor make_tensor(BufferPtr buffer, at::IntArrayRef sizes) {
  return make_tensor(std::move(buffer), sizes, dense_strides(sizes), 0);
}

namespace {

/// The numbers may be anything: as_strided and files hand them through.
void check_within(const QuantizedTensorImpl& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                  int64_t offset) {
  const auto is_negative = [](int64_t number) { return number < 0; };
  TORCH_CHECK(
      sizes.size() == strides.size() && !is_negative(offset) &&
          std::none_of(sizes.begin(), sizes.end(), is_negative) &&
          std::none_of(strides.begin(), strides.end(), is_negative),
      fmt::format("qshard: a view of a quantized tensor cannot have sizes {}, strides {} and "
                  "storage_offset {}: one for each dimension, and none below 0",
                  sizes, strides, offset));
  // A view without elements may begin anywhere, as far as one can count on from there.
  constexpr int64_t kMaxOffset = int64_t{1} << 60;
  const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  int64_t last = offset;
  bool overflows = false;
  for (size_t i = 0; i < sizes.size() && !is_empty; ++i) {
    int64_t extent = 0;
    overflows |= c10::mul_overflows(sizes[i] - 1, strides[i], &extent);
    overflows |= c10::add_overflows(last, extent, &last);
  }
  const Layout& layout = self.buffer()->layout();
  TORCH_CHECK(
      is_empty ? offset <= kMaxOffset : !overflows && last < layout.rows * layout.cols,
      fmt::format("qshard: a view of sizes {}, strides {} and storage_offset {} (in elements) "
                  "does not lie within a quantized tensor of {} x {} elements",
                  sizes, strides, offset, layout.rows, layout.cols));
}

/// A view below autograd, which otherwise makes the views of a tensor share its version counter.
at::Tensor view_of(const QuantizedTensorImpl& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                   int64_t offset, bool is_export) {
  self.buffer()->counters().share();
  auto view = at::detail::make_tensor<QuantizedTensorImpl>(self.buffer(), self.key_set(), sizes,
                                                           strides, offset, is_export);
  auto* impl = view.unsafeGetTensorImpl();
  if (!impl->is_inference()) impl->set_version_counter(self.version_counter());
  return view;
}

}  // namespace

at::Tensor make_view(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                     int64_t offset) {
  const auto& impl = impl_of(self);
  check_within(impl, sizes, strides, offset);
  return view_of(impl, sizes, strides, offset, impl.is_export());
}

at::Tensor make_export_view(const at::Tensor& self) {
  const auto& impl = impl_of(self);
  return view_of(impl, impl.sizes(), impl.strides(), impl.storage_offset(), /*is_export=*/true);
}

at::Tensor window(const at::Tensor& plane, const at::Tensor& self) {
  if (self.numel() == 0) return at::empty(self.sizes(), plane.options());
  return plane.as_strided(self.sizes(), self.strides(),
                          plane.storage_offset() + self.storage_offset());
}

bool is_dense(const at::Tensor& self) {
  int64_t span = 1, elements = 1;
  for (int64_t i = self.dim() - 1; i >= 0; --i) {
    const bool is_new = self.size(i) == 1 && self.stride(i) == elements;  // unsqueeze() made it
    if (self.stride(i) != span && !is_new) return false;
    span *= std::max<int64_t>(self.size(i), 1);
    elements *= self.size(i);
  }
  return true;
}

std::optional<RowWindow> row_window(const at::Tensor& self) {
  const int64_t cols = buffer_of(self).layout().cols;
  if (cols == 0) {  // rows without elements still count
    return RowWindow{
        0, self.dim() < 2 ? 0 : c10::multiply_integers(self.sizes().slice(0, self.dim() - 1))};
  }
  const int64_t offset = self.storage_offset(), numel = self.numel();
  if (!is_dense(self) || offset % cols != 0 || numel % cols != 0) return std::nullopt;
  return RowWindow{offset / cols, numel / cols};
}

std::vector<RowWindow> row_runs(const at::Tensor& self) {
  const Layout& layout = buffer_of(self).layout();
  const int64_t cols = layout.cols;
  std::vector<RowWindow> runs;
  const auto add = [&](RowWindow rows) {
    const int64_t end = rows.first + rows.count;
    for (int64_t row = rows.first; row < end; row += runs.back().count) {
      runs.push_back({row, run_from(layout, row, end - row)});
    }
  };
  if (const auto rows = row_window(self)) {
    add(*rows);
    if (runs.empty()) runs.push_back(*rows);
    return runs;
  }
  // The same rows of each matrix of a stack.
  const bool is_cut = self.dim() == 3 && self.numel() > 0 && self.size(2) == cols &&
                      self.stride(2) == 1 && self.stride(1) == cols && self.stride(0) > 0 &&
                      self.stride(0) % cols == 0 && self.storage_offset() % cols == 0;
  if (!is_cut) return runs;
  const int64_t first = self.storage_offset() / cols, step = self.stride(0) / cols;
  for (int64_t i = 0; i < self.size(0); ++i) add({first + i * step, self.size(1)});
  return runs;
}

bool covers_live_rows(const at::Tensor& self) {
  const QuantizedBuffer& buffer = buffer_of(self);
  const Layout& layout = buffer.layout();
  const int64_t live = layout.live_rows();
  const auto rows = row_window(self);
  return rows && (live == 0 || (rows->first == 0 && rows->count >= live));
}

at::Tensor value_of(const at::Tensor& self) {
  PlainGuard guard;
  return window(buffer_of(self).value().operand(), self);
}

at::Tensor value_copy(const at::Tensor& self, at::MemoryFormat format) {
  PlainGuard guard;
  QuantizedBuffer& buffer = buffer_of(self);
  const auto value = window(buffer.value().operand(), self);
  const bool is_dense =
      format == at::MemoryFormat::Preserve || format == at::MemoryFormat::Contiguous;
  const bool fresh = is_dense && !buffer.keeps_master() && !buffer.planes().pending().defined() &&
                     value.is_contiguous() &&
                     self.numel() == buffer.layout().rows * buffer.layout().cols;
  return fresh ? value : value.clone(format);
}

void bump_and_mark_written(const at::Tensor& self) {
  QuantizedBuffer& buffer = buffer_of(self);
  if (self.numel() > 0) {
    bump_version(self);
    return buffer.written();
  }
  const c10::TensorImpl& tensor = *self.unsafeGetTensorImpl();
  buffer.mark_empty_write(tensor);
  bump_version(self);
  buffer.flush_state().watch().expect_version_bump(tensor);  // the bump belongs to this write
}

std::string describe(const at::Tensor& self) {
  if (!is_quantized(self)) {
    const bool is_strided = self.layout() == at::kStrided && !self.is_nested();
    return fmt::format("plain {}{}{} on {}",
                       !is_strided            ? c10::str(self.layout(), " ")
                       : self.is_contiguous() ? "contiguous "
                                              : "not contiguous ",
                       c10::toString(self.scalar_type()),
                       self.is_nested() ? "" : c10::str(self.sym_sizes()), self.device().str());
  }
  const QuantizedBuffer& buffer = buffer_of(self);
  return fmt::format("{} {}[{}] on {}", buffer.layout().format->name, c10::toString(buffer.dtype()),
                     fmt::join(self.sizes(), ", "), buffer.device().str());
}

}  // namespace qshard
