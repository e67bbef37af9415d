// Factories that take a quantized template.
//
// They make plain tensors, as everywhere in torch: what people write into them are values.
// FSDP2's constructor and nn.Module._apply, which make shards and weights by factories, say so
// beforehand (make_shards). Where code like FSDP2's does not, rows that are copied into new memory
// for a shard make it one (shard_to_be.h).
#include <ATen/ExpandUtils.h>
#include <c10/util/safe_numerics.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>

#include "dispatch/aten/native_kernels.h"
#include "dispatch/buffer/make_buffer.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "dispatch/tensor/shard_to_be.h"

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

/// Whether a shard of the logical tensor that `self` is a window of can have these sizes.
bool can_be_shard(const at::Tensor& self, at::IntArrayRef sizes) {
  const Layout& layout = buffer_of(self).layout();
  if (self.dim() < 2 || self.dim() != static_cast<int64_t>(sizes.size())) return false;
  const int64_t rows = c10::multiply_integers(sizes.slice(0, sizes.size() - 1));
  return self.sizes().slice(1).equals(sizes.slice(1)) && sizes.back() == layout.cols &&
         (is_one_range(layout) ? rows <= layout.logical_rows : rows == layout.rows);
}

/// Whether these sizes are those of the stack `self` but for fewer rows of each matrix.
bool cuts_matrices(const at::Tensor& self, at::IntArrayRef sizes) {
  return self.dim() == 3 && sizes.size() == 3 && sizes[0] == self.size(0) &&
         sizes[1] < self.size(1) && sizes[2] == self.size(2);
}

/// What factories make on this thread (make_shards).
thread_local std::optional<int64_t> t_shards;

/// FSDP2 cuts the rows of `self` into chunks of as many rows as `sizes` have, the last ones padded,
/// one for each rank. This is the rank's, without values. Row padding and ranks without rows live
/// by what new_zeros leaves: zeros, with the template's scales.
at::Tensor make_shard(const at::Tensor& self, at::IntArrayRef sizes, const NewArgs& args, Fill fill,
                      int64_t rank) {
  QuantizedBuffer& from = buffer_of(self);
  if (cuts_matrices(self, sizes) && covers_live_rows(self)) {
    check_can_cut_matrices(from.placement(), sizes);
    const auto place = from.placement().slice_of_each(rank * sizes[1], sizes[1]);
    return make_tensor(make_buffer_of_rows(from, place, args.dtype, args.device, fill), sizes);
  }
  const auto rows = row_window(self);
  TORCH_CHECK_NOT_IMPLEMENTED(
      rows && can_be_shard(self, sizes),
      fmt::format(
          "qshard: this quantized parameter is sharded by another dimension than its rows "
          "(a shard of shape {} of a {}); rows are the unit of quantized shards. Return "
          "Shard(0) from shard_placement_fn, or, for a stack of matrices (three dimensions), "
          "Shard(1). If tensor parallelism has cut it, say so: qshard.quantize_(model, recipe, "
          "tp_mesh=tp_mesh)",
          sizes, describe(self)));
  const int64_t held = c10::multiply_integers(sizes.slice(0, sizes.size() - 1));
  int64_t row = 0;
  const bool is_beyond = c10::mul_overflows(rank, held, &row) ||
                         c10::add_overflows(row, from.layout().row_offset + rows->first, &row);
  if (is_beyond) row = from.layout().logical_rows;  // slice() ends there
  const bool is_whole = covers_live_rows(self) && held >= from.layout().live_rows();
  auto shard = make_buffer_of_rows(from, from.placement().slice(row, held, is_whole), args.dtype,
                                   args.device, fill);
  return make_tensor(std::move(shard), sizes);
}

/// `new_empty([])` is what DCP's stager and others build `set_(storage, ...)` on: it carries the
/// template's metadata and no bytes.
at::Tensor rebuild_template(const at::Tensor& self, const NewArgs& args) {
  return make_tensor(make_buffer_without_bytes(buffer_of(self), args.dtype, args.device), {});
}

at::Tensor new_tensor(const at::Tensor& self, at::IntArrayRef sizes, const NewArgs& args,
                      Fill fill) {
  PlainGuard guard;
  if (keeps_kind(self, args.dtype)) {
    const bool is_alike = self.dim() == static_cast<int64_t>(sizes.size());  // not its new_empty(0)
    if (t_shards && *t_shards != kSameRows && is_alike) {
      return make_shard(self, sizes, args, fill, *t_shards);
    }
    if (can_be_shard(self, sizes) && !args.device.is_meta()) {
      return make_shard_to_be(self, sizes, args.plain(), fill);
    }
  }
  return fill == Fill::kZeros ? at::zeros(sizes, args.plain()) : at::empty(sizes, args.plain());
}

at::Tensor new_empty(const at::Tensor& self, c10::SymIntArrayRef size, DTypeArg dtype, LayoutArg,
                     DeviceArg device, BoolArg pinned) {
  const NewArgs args(self, dtype, device, pinned);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (sizes.empty() && self.dim() > 0 && keeps_kind(self, args.dtype)) {
    return rebuild_template(self, args);
  }
  return new_tensor(self, sizes, args, Fill::kNothing);
}

at::Tensor new_zeros(const at::Tensor& self, c10::SymIntArrayRef size, DTypeArg dtype, LayoutArg,
                     DeviceArg device, BoolArg pinned) {
  return new_tensor(self, C10_AS_INTARRAYREF_SLOW(size), NewArgs(self, dtype, device, pinned),
                    Fill::kZeros);
}

/// As torch's own: dense strides in the order of `self`'s, unless another format is asked for.
at::Tensor plain_like(const at::Tensor& self, const NewArgs& args, FormatArg format) {
  if (format.value_or(at::MemoryFormat::Preserve) != at::MemoryFormat::Preserve) {
    return at::empty(self.sizes(), args.plain().memory_format(format));
  }
  return at::empty_strided(self.sizes(), at::infer_dense_strides(self.sizes(), self.strides()),
                           args.plain());
}

/// On meta there are no values, and a weight that is made there, by transformers and DCP for one,
/// is quantized before it has any: then it gets memory here.
at::Tensor empty_like(const at::Tensor& self, DTypeArg dtype, LayoutArg layout, DeviceArg device,
                      BoolArg pinned, FormatArg format) {
  const NewArgs args(self, dtype, device, pinned);
  const bool stays = keeps_kind(self, args.dtype) && self.is_contiguous() &&
                     layout.value_or(at::kStrided) == at::kStrided &&
                     can_be_shard(self, self.sizes()) && row_window(self) &&
                     format.value_or(at::MemoryFormat::Preserve) == at::MemoryFormat::Preserve;
  if (!stays) return plain_like(self, args, format);
  PlainGuard guard;
  if (t_shards || self.is_meta() || args.device.is_meta()) {
    return make_shard(self, self.sizes(), args, Fill::kNothing, 0);
  }
  return make_shard_to_be(self, self.sizes(), args.plain(), Fill::kNothing);
}

at::Tensor zeros_like(const at::Tensor& self, DTypeArg dtype, LayoutArg, DeviceArg device,
                      BoolArg pinned, FormatArg format) {
  return plain_like(self, NewArgs(self, dtype, device, pinned), format).zero_();
}

}  // namespace

void make_shards(std::optional<int64_t> rank) { t_shards = rank; }

bool makes_shards() { return t_shards.has_value(); }

void register_factories(torch::Library& aten) {
  aten.impl("new_empty", &new_empty);
  aten.impl("new_zeros", &new_zeros);
  aten.impl("empty_like", &empty_like);
  aten.impl("zeros_like", &zeros_like);
}

}  // namespace qshard
