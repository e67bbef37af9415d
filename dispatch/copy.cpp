// copy_, clone, _to_copy, set_ and what else moves whole tensors.
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "dispatch/flush.h"
#include "dispatch/kernel_bridge.h"
#include "dispatch/native_kernels.h"
#include "dispatch/quantized_tensor_impl.h"

namespace qshard {
namespace {

// ---------------------------------------------------------------------------------- copy_

bool same_kind(const QuantizedBuffer& a, const QuantizedBuffer& b) {
  return a.layout.format == b.layout.format && a.layout.images == b.layout.images &&
         a.layout.cols == b.layout.cols && a.layout.logical_rows == b.layout.logical_rows &&
         a.layout.matrix_rows == b.layout.matrix_rows;
}

/// The logical row that row 0 of `self`'s buffer gets if `src` is copied in, or nullopt if the two
/// windows are not the same rows of the same logical tensor.
std::optional<int64_t> placement_after_copy(const at::Tensor& self, const at::Tensor& src) {
  const QuantizedBuffer& to = buffer_of(self);
  const QuantizedBuffer& from = buffer_of(src);
  if (!same_kind(to, from) || self.sizes() != src.sizes()) return std::nullopt;
  const auto to_rows = row_window(self);
  const auto from_rows = row_window(src);
  if (!to_rows || !from_rows) return std::nullopt;
  if (self.numel() == 0) return to.layout.row_offset;
  if (from.layout.row_offset == Layout::kOpen) return std::nullopt;
  const int64_t place = from.layout.row_offset + from_rows->first - to_rows->first;
  const bool fits =
      to.layout.row_offset == Layout::kOpen ? place >= 0 : place == to.layout.row_offset;
  return fits ? std::optional(place) : std::nullopt;
}

/// Rows of two contiguous planes of the same dtype and width.
void copy_rows(const at::Tensor& to, RowWindow to_rows, const at::Tensor& from, RowWindow from_rows,
               bool non_blocking) {
  if (to.is_cpu() && from.is_cpu()) {
    const size_t row = to.size(1) * to.element_size();
    std::memmove(static_cast<uint8_t*>(to.mutable_data_ptr()) + to_rows.first * row,
                 static_cast<const uint8_t*>(from.const_data_ptr()) + from_rows.first * row,
                 to_rows.count * row);
    return;
  }
  to.narrow(0, to_rows.first, to_rows.count)
      .copy_(from.narrow(0, from_rows.first, from_rows.count), non_blocking);
}

/// Copies codes (and master rows) as bytes where that shows exactly the source's value and leaves
/// no block with two scales: within one grid generation, or all live rows together with their grid.
bool copy_bytes(const at::Tensor& self, const at::Tensor& src, int64_t place, bool non_blocking) {
  QuantizedBuffer& to = buffer_of(self);
  QuantizedBuffer& from = buffer_of(src);
  if (from.is_stale()) return false;
  if (to.keeps_master() && (!from.keeps_master() || to.dtype != from.dtype)) return false;

  Layout placed = to.layout;
  placed.row_offset = place;
  const auto to_rows = *row_window(self);
  const auto from_rows = *row_window(src);
  const bool whole =
      placed.live_rows() == 0 || (to_rows.first == 0 && to_rows.count >= placed.live_rows());
  if (!whole && (to.generation != from.generation || to.is_stale())) return false;

  from.check_is_allocated();
  to.check_is_allocated();
  to.detach_from_source();
  to.layout = placed;
  if (to_rows.count > 0) {
    copy_rows(to.image, to_rows, from.image, from_rows, non_blocking);
    if (to.keeps_master()) {
      copy_rows(to.master, to_rows, from.value_plane(), from_rows, non_blocking);
    }
  }
  if (!whole) {
    to.dirty |= from.is_dirty();
    if (to.keeps_master()) to.known_amax.reset();  // those of rows that are gone
    ++to.writes;
    return true;
  }
  if (to.generation != from.generation) {
    to.own_grid();
    if (to.grid.defined()) to.grid.copy_(from.grid, non_blocking);
    to.state.copy_from(from.state);
    to.generation = from.generation;
    to.grid_snapshot.reset();
  }
  to.pending.reset();
  to.inherit_flags(from);
  return true;
}

void write_values(const at::Tensor& self, const at::Tensor& values, bool non_blocking) {
  QuantizedBuffer& buffer = buffer_of(self);
  const bool had_pending = buffer.pending.defined();
  at::assert_no_internal_overlap(self);
  try {
    if (self.numel() > 0) {
      const at::Tensor plane = buffer.write_plane();
      // A window and an expanded source cost a dispatch each; the usual copy needs neither.
      const bool is_whole = self.sizes() == plane.sizes() && self.is_contiguous();
      const bool expands = values.sizes() != self.sizes();
      (is_whole ? plane : window(plane, self))
          .copy_(expands ? values.expand(self.sizes()) : values, non_blocking);
    }
  } catch (...) {
    if (!had_pending) buffer.pending.reset();
    throw;
  }
  buffer.mark_written();
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  PlainGuard guard;
  const bool from_quantized = has_key(src);
  if (!has_key(self)) {
    return self.copy_(value_of(src), non_blocking);
  }
  c10::OptionalDeviceGuard device_guard(self.device());
  TORCH_CHECK(at::is_expandable_to(src.sizes(), self.sizes()),
              fmt::format("copy_: a source of shape {} cannot be broadcast to a {}", src.sizes(),
                          describe(self)));
  if (from_quantized) {
    const auto place = placement_after_copy(self, src);
    if (place && copy_bytes(self, src, *place, non_blocking)) return self;
    if (place) buffer_of(self).layout.row_offset = *place;
  }
  write_values(self, from_quantized ? value_of(src) : src, non_blocking);
  return self;
}

// -------------------------------------------------------------------- clone and _to_copy

/// All planes of `from` on another device or in another nominal dtype; padding rows and placement
/// included, because FSDP2 hands copies of padded shards to its hooks. `rows` may exceed the
/// source's: the rest is zero. A change of dtype rounds the master and keeps the codes, which were
/// rounded from the wider value: autocast casts the weight of F.linear this way, and its GEMM
/// should not see values rounded twice.
BufferPtr copy_buffer(QuantizedBuffer& from, at::ScalarType dtype, at::Device device,
                      bool non_blocking, int64_t rows, bool pinned = false) {
  from.check_is_allocated();
  from.detach_from_source();
  Layout layout = from.layout;
  layout.rows = rows;
  if (from.is_packed() && !pinned && !from.is_meta() && dtype == from.dtype &&
      device == from.device() && rows == from.layout.rows) {
    const int64_t bytes = from.packed_bytes();
    auto storage = allocate_storage(bytes, device, Fill::kNothing);
    copy_on_device(storage.mutable_data(), from.storage.data(), bytes, device);
    auto to = QuantizedBuffer::from_storage(std::move(storage), layout, dtype, from.keeps_master());
    if (from.pending.defined()) to->pending = from.pending.clone();
    to->inherit_parameter(from);
    to->generation = from.generation;
    to->inherit_flags(from);
    return to;
  }
  auto to = QuantizedBuffer::allocate(layout, dtype, from.keeps_master(), device);
  if (pinned) {
    auto bytes = at::empty({to->packed_bytes()}, at::TensorOptions().dtype(at::kByte)).pin_memory();
    to = QuantizedBuffer::from_storage(bytes.storage(), layout, dtype, from.keeps_master());
    to->image.zero_();
  }
  to->inherit_parameter(from);
  if (to->is_meta() != from.is_meta()) {
    TORCH_CHECK(to->is_meta(),
                "qshard: cannot copy a quantized tensor out of the meta device; there "
                "is no data. Use to_empty() and initialise it");
    to->dirty = from.is_dirty();
    return to;
  }
  to->image.narrow(0, 0, from.layout.rows).copy_(from.image, non_blocking);
  if (to->grid.defined()) to->grid.copy_(from.grid, non_blocking);
  if (from.keeps_master()) {
    if (rows != from.layout.rows) to->master.zero_();
    to->master.narrow(0, 0, from.layout.rows).copy_(from.master, non_blocking);
  }
  if (from.pending.defined()) {
    to->pending = at::zeros({rows, layout.cols}, to->image.options().dtype(dtype));
    to->pending.narrow(0, 0, from.layout.rows).copy_(from.pending, non_blocking);
  }
  to->generation = from.generation;
  to->inherit_flags(from);
  return to;
}

at::Tensor clone(const at::Tensor& self, std::optional<at::MemoryFormat>) {
  const auto& impl = impl_of(self);
  if (impl.is_export() || self.dim() < 2 || !covers_live_rows(self)) return value_copy(self);
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(self.device());
  QuantizedBuffer& from = *impl.buffer();
  auto copy = copy_buffer(from, from.dtype, from.device(), false, from.layout.rows);
  return make_tensor(std::move(copy), self.sizes(), self.strides(), self.storage_offset());
}

at::Tensor to_copy(const at::Tensor& self, std::optional<at::ScalarType> dtype_arg,
                   std::optional<at::Layout> layout, std::optional<at::Device> device_arg,
                   std::optional<bool> pinned, bool non_blocking,
                   std::optional<at::MemoryFormat> memory_format) {
  const auto& impl = impl_of(self);
  const auto dtype = dtype_arg.value_or(self.scalar_type());
  const auto device = device_arg.value_or(self.device());
  const bool narrows =
      is_value_dtype(dtype) && c10::elementSize(dtype) <= c10::elementSize(self.scalar_type());
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(device.is_meta() ? self.device() : device);
  if (impl.is_export() || !narrows || layout.value_or(at::kStrided) != at::kStrided) {
    return at::_to_copy(value_of(self), dtype, layout, device, pinned, non_blocking, memory_format);
  }
  const BufferPtr& from = impl.buffer();
  BufferPtr copy;
  if (non_blocking && dtype == from->dtype && !device.is_meta() && !from->is_meta()) {
    copy = QuantizedBuffer::image_copy(from->source ? from->source : from, device);
  } else {
    copy =
        copy_buffer(*from, dtype, device, non_blocking, from->layout.rows, pinned.value_or(false));
  }
  return make_tensor(std::move(copy), self.sizes(), self.strides(), self.storage_offset());
}

/// Zero rows after the last one keep the kind (how DTensor pads shards before a scatter).
at::Tensor constant_pad_nd(const at::Tensor& self, c10::SymIntArrayRef pad_,
                           const at::Scalar& value) {
  const auto pad = C10_AS_INTARRAYREF_SLOW(pad_);
  const auto last = static_cast<int64_t>(pad.size()) - 1;
  const bool only_rows_at_end =
      last == 2 * self.dim() - 1 && pad[last] >= 0 &&
      std::all_of(pad.begin(), pad.end() - 1, [](int64_t n) { return n == 0; });
  const auto rows = row_window(self);
  PlainGuard guard;
  if (self.dim() != 2 || !only_rows_at_end || !rows || value.toDouble() != 0.0 ||
      !covers_live_rows(self)) {
    return at::constant_pad_nd(value_of(self), pad, value);
  }
  QuantizedBuffer& from = buffer_of(self);
  auto padded = copy_buffer(from, from.dtype, from.device(), false, from.layout.rows + pad[last]);
  return make_tensor(std::move(padded), {self.size(0) + pad[last], self.size(1)});
}

// ------------------------------------------------------------------------------------ cat

/// Whether these tensors, one after the other, are consecutive rows of one logical tensor with the
/// same scales.
bool are_consecutive_rows(const at::ITensorListRef& tensors) {
  const at::Tensor& first = *tensors.begin();
  std::optional<int64_t> next;
  for (const at::Tensor& tensor : tensors) {
    if (!has_key(tensor) || impl_of(tensor).is_export() || tensor.dim() < 2) return false;
    const QuantizedBuffer& buffer = buffer_of(tensor);
    const QuantizedBuffer& head = buffer_of(first);
    const auto rows = row_window(tensor);
    const bool fits = rows && same_kind(buffer, head) && buffer.dtype == head.dtype &&
                      buffer.device() == head.device() && buffer.generation == head.generation &&
                      buffer.keeps_master() == head.keeps_master() && !buffer.is_stale() &&
                      !buffer.is_meta() && buffer.layout.row_offset != Layout::kOpen &&
                      tensor.sizes().slice(1) == first.sizes().slice(1);
    if (!fits) return false;
    const int64_t place = buffer.layout.row_offset + rows->first;
    if (next.value_or(place) != place) return false;
    next = place + rows->count;
  }
  return next.has_value();
}

/// Consecutive rows keep the kind; anything else is a plain tensor of the values.
at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
  PlainGuard guard;
  if (dim != 0 || !are_consecutive_rows(tensors)) {
    std::vector<at::Tensor> values;
    for (const at::Tensor& tensor : tensors) {
      values.push_back(has_key(tensor) ? value_of(tensor) : tensor);
    }
    return at::cat(values, dim);
  }
  const at::Tensor& first = *tensors.begin();
  QuantizedBuffer& from = buffer_of(first);
  auto sizes = first.sizes().vec();
  sizes[0] = 0;
  Layout layout = from.layout;
  layout.row_offset += row_window(first)->first;
  layout.rows = 0;
  for (const at::Tensor& tensor : tensors) {
    sizes[0] += tensor.size(0);
    layout.rows += row_window(tensor)->count;
  }
  c10::OptionalDeviceGuard device_guard(from.device());
  auto to = QuantizedBuffer::allocate_without_scales(layout, from.dtype, from.keeps_master(),
                                                     from.device(), Fill::kNothing);
  int64_t next = 0;
  for (const at::Tensor& tensor : tensors) {
    QuantizedBuffer& piece = buffer_of(tensor);
    piece.check_is_allocated();
    piece.detach_from_source();
    const RowWindow rows = *row_window(tensor);
    copy_rows(to->image, {next, rows.count}, piece.image, rows, false);
    if (to->keeps_master()) {
      copy_rows(to->master, {next, rows.count}, piece.master, rows, false);
    }
    next += rows.count;
  }
  if (to->grid.defined()) to->grid.copy_(from.grid);
  to->inherit_parameter(from);
  to->generation = from.generation;
  to->inherit_flags(from);
  return make_tensor(std::move(to), sizes);
}

// -------------------------------------------------------------------------------- storage

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto& impl = impl_of(self);
  const QuantizedBuffer& old = *impl.buffer();
  auto buffer =
      QuantizedBuffer::from_storage(std::move(source), old.layout, old.dtype, old.keeps_master());
  buffer->state = old.state;
  buffer->group = old.group;
  buffer->replica_groups = old.replica_groups;
  buffer->dirty = old.is_dirty();
  buffer->stale = buffer->dirty && buffer->keeps_master();
  const auto view =
      make_tensor(buffer, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), 0);
  make_view(view, view.sizes(), view.strides(), offset.expect_int());  // bounds check
  impl.set_buffer(std::move(buffer));
  impl.set_sizes_and_strides(view.sizes(), view.strides(), offset.expect_int());
  return self;
}

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return is_quantized(self) && is_quantized(from);
}

void record_stream(at::Tensor& self, at::Stream stream) {
  const QuantizedBuffer& buffer = buffer_of(self);
  for (const auto& plane : {buffer.image, buffer.master, buffer.grid, buffer.pending}) {
    if (plane.defined()) plane.record_stream(stream);
  }
}

bool is_pinned(const at::Tensor& self, std::optional<at::Device>) {
  return buffer_of(self).image.is_pinned();
}

at::Tensor pin_memory(const at::Tensor& self, std::optional<at::Device>) {
  PlainGuard guard;
  QuantizedBuffer& from = buffer_of(self);
  auto pinned = copy_buffer(from, from.dtype, from.device(), false, from.layout.rows, true);
  return make_tensor(std::move(pinned), self.sizes(), self.strides(), self.storage_offset());
}

}  // namespace

void register_copies(torch::Library& aten) {
  aten.impl("copy_", &copy_);
  aten.impl("clone", &clone);
  aten.impl("_to_copy", &to_copy);
  aten.impl("cat", &cat);
  aten.impl("constant_pad_nd", &constant_pad_nd);
  aten.impl("set_.source_Storage_storage_offset", &set_storage);
  aten.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  aten.impl("record_stream", &record_stream);
  aten.impl("is_pinned", &is_pinned);
  aten.impl("_pin_memory", &pin_memory);
}

}  // namespace qshard
