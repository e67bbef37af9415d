// copy_, clone, _to_copy, set_ and what else moves whole tensors.
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "dispatch/aten/fallback.h"
#include "dispatch/aten/native_kernels.h"
#include "dispatch/buffer/buffer_copies.h"
#include "dispatch/buffer/image_copy.h"
#include "dispatch/buffer/make_buffer.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "dispatch/tensor/shard_to_be.h"
#include "dispatch/tensor/write_scope.h"

namespace qshard {
namespace {

// ---------------------------------------------------------------------------------- copy_

bool same_kind(const QuantizedBuffer& a, const QuantizedBuffer& b) {
  const Layout& x = a.layout();
  const Layout& y = b.layout();
  return x.format == y.format && x.images == y.images && x.cols == y.cols &&
         x.logical_rows == y.logical_rows && x.matrix_rows == y.matrix_rows;
}

/// All rows of `self` as they are in `src`; none unless both show the same rows of the logical
/// tensor.
std::vector<RowCopy> row_copies(const at::Tensor& self, const at::Tensor& src) {
  const QuantizedBuffer& to = buffer_of(self);
  const QuantizedBuffer& from = buffer_of(src);
  if (!same_kind(to, from) || self.sizes() != src.sizes()) return {};
  std::vector<RowCopy> copies;
  const auto add = [&](RowWindow to_rows, RowWindow from_rows) {
    if (!copies.empty()) {
      auto& [to_last, from_last] = copies.back();
      if (to_last.first + to_last.count == to_rows.first &&
          from_last.first + from_last.count == from_rows.first) {
        to_last.count += to_rows.count;
        from_last.count += from_rows.count;
        return;
      }
    }
    copies.push_back({to_rows, from_rows});
  };
  // Runs of both may end at different rows.
  auto to_runs = row_runs(self), from_runs = row_runs(src);
  for (auto t = to_runs.begin(), f = from_runs.begin();
       t != to_runs.end() && f != from_runs.end();) {
    // Where a rank has none of them, too, its place says so.
    if (logical_row(to.layout(), t->first) != logical_row(from.layout(), f->first)) return {};
    const int64_t count = std::min(t->count, f->count);
    add({t->first, count}, {f->first, count});
    for (auto* run : {&t, &f}) {
      (*run)->first += count;
      (*run)->count -= count;
      if ((*run)->count == 0) ++*run;
    }
  }
  return copies;
}

void write_values(const at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  const bool is_itself = self.is_same(src);  // nothing to copy, whatever its strides
  if (!is_itself) at::assert_no_internal_overlap(self);
  const WriteScope scope(self);
  try {
    const at::Tensor plane = has_key(src) ? scope.plane() : scope.whole_plane();
    // A source in the same plane is read there: as with plain tensors, torch refuses sources
    // that overlap the target.
    if (!is_itself) plane.copy_(value_or_itself(src), non_blocking);
  } catch (...) {
    scope.roll_back(/*may_have_written=*/false);
    throw;
  }
  scope.commit_before_bump();
}

/// Whether all ranks call this copy. FSDP2 makes shards, and DCP fills export views, by copies that
/// only ranks with rows call. Kernels of an optimizer's step write on all ranks.
bool is_called_by_all_ranks(const at::Tensor& self) {
  return buffer_of(self).placement().may_have_peers() && !makes_shards() &&
         !impl_of(self).is_export() && !is_in_step();
}

void copy_into_quantized(const at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  c10::OptionalDeviceGuard device_guard(self.device());
  TORCH_CHECK(at::is_expandable_to(src.sizes(), self.sizes()),
              fmt::format("copy_: a source of shape {} cannot be broadcast to a {}", src.sizes(),
                          describe(self)));
  QuantizedBuffer& buffer = buffer_of(self);
  const bool is_itself = has_key(src) && &buffer == &buffer_of(src);  // torch reports overlaps
  if (has_key(src) && !is_itself) {
    const auto copies = row_copies(self, src);
    if (!copies.empty() && buffer.copy_rows_from(buffer_of(src), copies, non_blocking)) {
      buffer.flush_state().watch().expect_version_bump(*self.unsafeGetTensorImpl());
      return;
    }
  }
  write_values(self, src, non_blocking);
  MayDiffer& may_differ = buffer.flush_state().may_differ();
  may_differ.kept_scaling_state = true;
  may_differ.in_codes |= is_called_by_all_ranks(self);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  PlainGuard guard;
  if (!has_key(self)) {
    // Code like FSDP2's calls this where there are rows.
    if (const at::Tensor shard = become_shard(self, src); shard.defined()) {
      copy_into_quantized(shard, src, non_blocking);
      if (has_key(self)) return self;
    }
    return self.copy_(value_of(src), non_blocking);
  }
  // An error of some ranks, whose rows the source does not fit, leaves them in step with the
  // others.
  if (is_called_by_all_ranks(self)) buffer_of(self).flush_state().may_differ().in_writes = true;
  copy_into_quantized(self, src, non_blocking);
  return self;
}

// -------------------------------------------------------------------- clone and _to_copy

/// Whether these are all live rows, or no row of those that a rank has: one without rows cannot
/// tell.
bool shows_rows(const at::Tensor& self) {
  const auto rows = row_window(self);
  return rows && (rows->count == 0 || covers_live_rows(self));
}

/// Whether a copy of `self` keeps the kind: of all live rows, in their order or transposed. Rows
/// and columns out of the middle are copied as the values they are.
bool shows_whole_buffer(const at::Tensor& self) {
  return self.dim() >= 2 && !impl_of(self).is_export() &&
         (shows_rows(self) || (self.dim() == 2 && shows_rows(self.t())));
}

/// Whether a copy in this memory format has the strides of `self`, which a quantized copy keeps.
bool keeps_strides(const at::Tensor& self, std::optional<at::MemoryFormat> format) {
  const auto wanted = format.value_or(at::MemoryFormat::Preserve);
  return wanted == at::MemoryFormat::Preserve ||
         (wanted == at::MemoryFormat::Contiguous && is_dense(self));
}

at::Tensor clone(const at::Tensor& self, std::optional<at::MemoryFormat> format) {
  const auto& impl = impl_of(self);
  if (!keeps_strides(self, format) || impl.is_export() || self.dim() < 2 || !shows_rows(self)) {
    return value_copy(self, format.value_or(at::MemoryFormat::Preserve));
  }
  c10::OptionalDeviceGuard device_guard(self.device());
  return make_tensor(copy_buffer(*impl.buffer()), self.sizes(), self.strides(),
                     self.storage_offset());
}

at::Tensor to_copy(const at::Tensor& self, std::optional<at::ScalarType> dtype_arg,
                   std::optional<at::Layout> layout, std::optional<at::Device> device_arg,
                   std::optional<bool> pinned, bool non_blocking,
                   std::optional<at::MemoryFormat> memory_format) {
  const auto dtype = dtype_arg.value_or(self.scalar_type());
  const auto device = device_arg.value_or(self.device());
  const bool narrows =
      is_value_dtype(dtype) && c10::elementSize(dtype) <= c10::elementSize(self.scalar_type());
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(device.is_meta() ? self.device() : device);
  if (!narrows || layout.value_or(at::kStrided) != at::kStrided || !shows_whole_buffer(self) ||
      !keeps_strides(self, memory_format)) {
    return at::_to_copy(value_of(self), dtype, layout, device, pinned, non_blocking, memory_format);
  }
  const BufferPtr& from = impl_of(self).buffer();
  const bool moves_image = non_blocking && dtype == from->dtype() && !device.is_meta() &&
                           !from->device().is_meta() && from->placement().is_share();
  BufferPtr copy;
  if (moves_image) {
    copy = ImageCopy::of(*from->original(), device);
  } else {
    copy = copy_buffer(*from, {dtype, device, non_blocking, pinned.value_or(false)});
  }
  return make_tensor(std::move(copy), self.sizes(), self.strides(), self.storage_offset());
}

// ------------------------------------------------------------------------------------ cat

using Piece = std::pair<BufferPtr, RowWindow>;

/// These tensors as consecutive rows of one logical tensor with the same scales, or none if they
/// are not.
std::vector<Piece> consecutive_rows(const at::ITensorListRef& tensors) {
  const at::Tensor& first = *tensors.begin();
  std::vector<Piece> pieces;
  for (const at::Tensor& tensor : tensors) {
    if (!has_key(tensor) || impl_of(tensor).is_export() || tensor.dim() < 2) return {};
    QuantizedBuffer& buffer = buffer_of(tensor);
    QuantizedBuffer& head = buffer_of(first);
    const auto rows = row_window(tensor);
    // Pieces without rows do not tell whether they would follow one another.
    const bool fits = rows && rows->count > 0 && is_one_range(buffer.layout()) &&
                      same_kind(buffer, head) && buffer.dtype() == head.dtype() &&
                      buffer.device() == head.device() && buffer.flush_state().codes_current() &&
                      !buffer.device().is_meta() && !buffer.planes().pending().defined() &&
                      buffer.generation() == head.generation() &&
                      buffer.keeps_master() == head.keeps_master() &&
                      tensor.sizes().slice(1) == first.sizes().slice(1);
    if (!fits) return {};
    if (!pieces.empty()) {
      const auto& [last, last_rows] = pieces.back();
      const int64_t end = last->layout().row_offset + last_rows.first + last_rows.count;
      if (buffer.layout().row_offset + rows->first != end) return {};
    }
    pieces.emplace_back(impl_of(tensor).buffer(), *rows);
  }
  return pieces;
}

/// Consecutive rows keep the kind; anything else is a plain tensor of the values.
at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  PlainGuard guard;
  const auto pieces = dim == 0 ? consecutive_rows(tensors) : std::vector<Piece>();
  if (pieces.empty()) {
    std::vector<at::Tensor> values;
    for (const at::Tensor& tensor : tensors) {
      values.push_back(value_or_itself(tensor));
    }
    return at::cat(values, dim);
  }
  const at::Tensor& first = *tensors.begin();
  c10::OptionalDeviceGuard device_guard(first.device());
  auto sizes = first.sizes().vec();
  sizes[0] = 0;
  for (const at::Tensor& tensor : tensors) sizes[0] += tensor.size(0);
  return make_tensor(concatenate(pieces), sizes);
}

// -------------------------------------------------------------------------------- storage

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto& impl = impl_of(self);
  TORCH_CHECK(source.device() == self.device(),
              fmt::format("set_: a storage on {} cannot become that of a {}; use .to(device)",
                          source.device().str(), describe(self)));
  auto buffer = make_buffer_over_storage(*impl.buffer(), std::move(source));
  const auto& [rows, cols] = std::pair(buffer->layout().rows, buffer->layout().cols);
  const auto whole = make_tensor(buffer, {rows, cols});
  const auto view = make_view(whole, C10_AS_INTARRAYREF_SLOW(sizes),
                              C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  impl.set_buffer(std::move(buffer), view.sizes(), view.strides(), view.storage_offset());
  return self;
}

std::string describe_plain(const at::Tensor& tensor) {
  return fmt::format("plain {}[{}] on {}", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "), tensor.device().str());
}

/// Another tensor's memory, as parametrizations put it into the parameter that they keep. The
/// values of a plain tensor are copied, since its memory has no room for codes.
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (is_quantized(self) && has_key(source)) {
    TORCH_CHECK(source.device() == self.device(),
                fmt::format("aten::set_: the memory of a {} cannot become that of a {}; use "
                            ".to(device)",
                            describe(source), describe(self)));
    const auto& from = impl_of(source);
    impl_of(self).set_buffer(from.buffer(), from.sizes(), from.strides(), from.storage_offset());
    return self;
  }
  TORCH_CHECK(is_quantized(self),
              fmt::format("aten::set_: a {} tensor cannot share the memory of a {}; copy_() copies "
                          "the values",
                          describe_plain(self), describe(source)));
  TORCH_CHECK(self.sizes() == source.sizes() && self.dtype() == source.dtype() &&
                  self.device() == source.device(),
              fmt::format("aten::set_: a {} takes the values of a plain tensor of the same shape, "
                          "dtype and device, got {}; assign a new Parameter, or use copy_()",
                          describe(self), describe_plain(source)));
  return copy_(self, source, /*non_blocking=*/false);
}

/// What `x.data = y` asks, before it changes anything, and whose "incompatible tensor type" says no
/// way out. nn.Module._apply asks it, too: of a plain parameter whether it may be replaced.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  if (!is_quantized(self)) return false;
  TORCH_CHECK(
      is_quantized(from),
      fmt::format("x.data = y would put a {} tensor in the place of {}. In the Trainer of "
                  "transformers quantize by qshard.integrations.transformers.QuantizeCallback; "
                  "elsewhere casts of accelerate and PEFT come before quantize_. x.data.copy_(y) "
                  "writes the values, and qshard.dequantize_(model) makes parameters plain; "
                  "ZeroRedundancyOptimizer needs parameters_as_bucket_view=False",
                  describe_plain(from), describe(self)));
  return true;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  const Planes& planes = buffer_of(self).planes();
  for (const ReadOnlyTensor* plane :
       {&planes.image(), &planes.master(), &planes.grid().read(), &planes.pending()}) {
    if (plane->defined()) plane->record_stream(stream);
  }
}

bool is_pinned(const at::Tensor& self, std::optional<at::Device>) {
  return buffer_of(self).planes().image().is_pinned();
}

at::Tensor pin_memory(const at::Tensor& self, std::optional<at::Device>) {
  QuantizedBuffer& from = buffer_of(self);
  auto pinned =
      copy_buffer(from, {from.dtype(), from.device(), /*non_blocking=*/false, /*pinned=*/true});
  return make_tensor(std::move(pinned), self.sizes(), self.strides(), self.storage_offset());
}

}  // namespace

void register_copies(torch::Library& aten) {
  aten.impl("copy_", &copy_);
  aten.impl("clone", &clone);
  aten.impl("_to_copy", &to_copy);
  aten.impl("cat", &cat);
  aten.impl("set_.source_Storage_storage_offset", &set_storage);
  aten.impl("set_.source_Tensor", &set_tensor);
  aten.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  aten.impl("record_stream", &record_stream);
  aten.impl("is_pinned", &is_pinned);
  aten.impl("_pin_memory", &pin_memory);
}

}  // namespace qshard
