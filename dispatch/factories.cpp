// Factories that take a quantized template.
//
// `new_zeros`, `new_empty` and `empty_like` keep the kind: FSDP2's padding and `to_empty` rest on
// them. Optimizers make their states with `zeros_like`, which must be plain.
#include <ATen/ExpandUtils.h>

#include "dispatch/kernel_bridge.h"
#include "dispatch/native_kernels.h"
#include "dispatch/quantized_tensor_impl.h"

namespace qshard {
namespace {

using DTypeArg = std::optional<at::ScalarType>;
using LayoutArg = std::optional<at::Layout>;
using DeviceArg = std::optional<at::Device>;
using BoolArg = std::optional<bool>;
using FormatArg = std::optional<at::MemoryFormat>;

struct NewArgs {
  at::ScalarType dtype;
  at::Device device;
  bool pinned;

  NewArgs(const at::Tensor& self, DTypeArg dtype, DeviceArg device, BoolArg pinned)
      : dtype(dtype.value_or(self.scalar_type())),
        device(device.value_or(self.device())),
        pinned(pinned.value_or(false)) {}

  at::TensorOptions plain() const {
    return at::TensorOptions().dtype(dtype).device(device).pinned_memory(pinned);
  }
};

/// Codes have no more precision than the nominal dtype: wider, or not a float of ours, means plain.
bool keeps_kind(const at::Tensor& self, at::ScalarType dtype) {
  return is_value_dtype(dtype) && c10::elementSize(dtype) <= c10::elementSize(self.scalar_type());
}

bool same_inner_shape(const at::Tensor& self, at::IntArrayRef sizes) {
  return self.dim() == static_cast<int64_t>(sizes.size()) &&
         self.sizes().slice(1).equals(sizes.slice(1));
}

/// The layout of a new tensor of `sizes`. Rows that fit the template's logical tensor may become a
/// shard of it, unplaced until a quantized copy_ says which. Other shapes are
/// logical tensors of their own, and plain ones where the format has no such shape.
Layout layout_for(const at::Tensor& self, at::IntArrayRef sizes) {
  const int64_t rows = c10::multiply_integers(sizes.slice(0, sizes.size() - 1));
  const Layout layout = buffer_of(self).layout().holding(rows).with_images(Images::kAll);
  if (same_inner_shape(self, sizes) && sizes.back() == layout.cols && rows <= layout.logical_rows) {
    return layout.placed(Layout::kUnplaced);
  }
  return layout.with_cols(sizes.back()).own_tensor(sizes[sizes.size() - 2]);
}

/// Row padding and ranks without rows live by what new_zeros leaves: zeros, with the template's
/// scales. What new_empty and empty_like leave is as undefined as a plain tensor's.
at::Tensor new_quantized(const at::Tensor& self, at::IntArrayRef sizes, const NewArgs& args,
                         Fill fill, std::optional<int64_t> row_offset = std::nullopt) {
  PlainGuard guard;
  QuantizedBuffer& from = buffer_of(self);
  Layout layout = layout_for(self, sizes);
  if (!layout.fits()) return at::zeros(sizes, args.plain());
  if (layout.row_offset != Layout::kUnplaced) {
    return make_tensor(
        QuantizedBuffer::allocate(layout, args.dtype, from.keeps_master(), args.device), sizes);
  }
  if (row_offset) layout = layout.placed(*row_offset);
  // FSDP2 makes padded shards like this of whole ones; rows out of a window are nobody's share.
  const bool is_shard = covers_live_rows(self) && layout.rows >= from.layout().live_rows();
  return make_tensor(
      QuantizedBuffer::like_rows(from, layout, args.dtype, args.device, fill, is_shard), sizes);
}

/// `new_empty([])` is what DCP's stager and others build `set_(storage, ...)` on: it carries the
/// template's metadata and no bytes.
at::Tensor rebuild_template(const at::Tensor& self, const NewArgs& args) {
  return make_tensor(QuantizedBuffer::without_bytes(buffer_of(self), args.dtype, args.device), {});
}

at::Tensor new_empty(const at::Tensor& self, c10::SymIntArrayRef size, DTypeArg dtype, LayoutArg,
                     DeviceArg device, BoolArg pinned) {
  const NewArgs args(self, dtype, device, pinned);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const bool is_plain = self.dim() == 0 || sizes.size() == 1;  // as of a scalar, or for a row
  if (!keeps_kind(self, args.dtype) || is_plain) return at::empty(sizes, args.plain());
  if (sizes.empty()) return rebuild_template(self, args);
  return new_quantized(self, sizes, args, Fill::kNothing);
}

at::Tensor new_zeros(const at::Tensor& self, c10::SymIntArrayRef size, DTypeArg dtype, LayoutArg,
                     DeviceArg device, BoolArg pinned) {
  const NewArgs args(self, dtype, device, pinned);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (!keeps_kind(self, args.dtype) || sizes.size() < 2) return at::zeros(sizes, args.plain());
  return new_quantized(self, sizes, args, Fill::kZeros);
}

/// As torch's own: dense strides in the order of `self`'s, unless another format is asked for.
at::Tensor plain_like(const at::Tensor& self, const NewArgs& args, FormatArg format) {
  if (format.value_or(at::MemoryFormat::Preserve) != at::MemoryFormat::Preserve) {
    return at::empty(self.sizes(), args.plain().memory_format(format));
  }
  return at::empty_strided(self.sizes(), at::infer_dense_strides(self.sizes(), self.strides()),
                           args.plain());
}

at::Tensor empty_like(const at::Tensor& self, DTypeArg dtype, LayoutArg layout, DeviceArg device,
                      BoolArg pinned, FormatArg format) {
  const NewArgs args(self, dtype, device, pinned);
  const auto rows = row_window(self);
  const bool is_whole_rows =
      self.dim() >= 2 && rows && self.size(-1) == buffer_of(self).layout().cols;
  if (!keeps_kind(self, args.dtype) || !is_whole_rows ||
      layout.value_or(at::kStrided) != at::kStrided) {
    return plain_like(self, args, format);
  }
  const QuantizedBuffer& from = buffer_of(self);
  if (!from.placement().is_placed()) {
    return new_quantized(self, self.sizes(), args, Fill::kNothing);
  }
  const int64_t offset = from.layout().row_offset;
  return new_quantized(self, self.sizes(), args, Fill::kNothing, offset + rows->first);
}

at::Tensor zeros_like(const at::Tensor& self, DTypeArg dtype, LayoutArg, DeviceArg device,
                      BoolArg pinned, FormatArg format) {
  return plain_like(self, NewArgs(self, dtype, device, pinned), format).zero_();
}

}  // namespace

void register_factories(torch::Library& aten) {
  aten.impl("new_empty", &new_empty);
  aten.impl("new_zeros", &new_zeros);
  aten.impl("empty_like", &empty_like);
  aten.impl("zeros_like", &zeros_like);
}

}  // namespace qshard
