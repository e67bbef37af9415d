// What checkpoints, pickles and deepcopy take a quantized tensor apart into.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "dispatch/aten/registration.h"
#include "dispatch/buffer/buffer_copies.h"
#include "dispatch/buffer/make_buffer.h"
#include "dispatch/buffer/packed_planes.h"
#include "dispatch/buffer/plane_access.h"
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "ops/calls/checked_call.h"
#include "ops/tensor/saved_tensor.h"

namespace qshard {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

Tensor export_view(const Tensor& self) { return make_export_view(self); }

bool is_export(const Tensor& self) { return is_quantized(self) && impl_of(self).is_export(); }

/// Whether the packed storage alone would lose a write: one that only a collective can flush.
bool has_pending_update(const Tensor& self) {
  const QuantizedBuffer& buffer = buffer_of(self);
  return !buffer.flush_state().codes_current() && !buffer.keeps_master() &&
         !buffer.placement().is_alone();
}

/// What a file says of a buffer in integers.
std::vector<int64_t> fields_of(const QuantizedBuffer& buffer) {
  const Layout& layout = buffer.layout();
  std::vector<int64_t> fields(kFields);
  fields[kRows] = layout.rows;
  fields[kCols] = layout.cols;
  fields[kLogicalRows] = layout.logical_rows;
  fields[kMatrixRows] = layout.matrix_rows;
  fields[kRowOffset] = layout.row_offset;
  fields[kKeepsMaster] = buffer.keeps_master();
  fields[kWritten] = buffer.flush_state().is_written();
  fields[kImages] = static_cast<int64_t>(layout.images);
  fields[kIsAdopted] = buffer.placement().knows_groups();
  return fields;
}

/// The exact planes of the whole buffer behind `self`, and a write that no flush has reached yet.
std::tuple<Tensor, OptionalTensor, std::vector<int64_t>, std::string, std::vector<Tensor>> pack(
    const Tensor& self) {
  QuantizedBuffer& buffer = buffer_of(self);
  PlainGuard guard;
  const Tensor bytes = pack_planes(buffer);
  std::vector<Tensor> state;
  for (const auto& [name, tensor] : buffer.scaling_state().tensors()) {
    state.push_back(tensor.clone());
  }
  const ReadOnlyTensor& pending = buffer.planes().pending();
  return {bytes, pending.defined() ? OptionalTensor(pending.operand().clone()) : std::nullopt,
          fields_of(buffer), std::string(buffer.layout().format->name), state};
}

/// @throws c10::Error if what the file says does not describe `bytes`.
Tensor unpack(const Tensor& bytes, const OptionalTensor& pending, at::IntArrayRef fields,
              c10::string_view format, at::IntArrayRef size, at::IntArrayRef stride,
              int64_t storage_offset, at::ScalarType dtype, at::TensorList state) {
  check_key_is_ours("qshard::_unpack");
  PlainGuard guard;
  const SavedTensor saved{bytes, pending, fields,         {format.data(), format.size()},
                          size,  stride,  storage_offset, dtype,
                          state};
  const Layout layout = checked_layout(saved);
  Placement placement(layout);
  if (is_adopted(saved, layout)) placement.adopt(Groups());
  auto buffer = unpack_planes(bytes, pending.value_or(Tensor()), placement, dtype,
                              fields[kKeepsMaster] != 0, fields[kWritten] != 0);
  const auto tensors = buffer->scaling_state().tensors();
  for (size_t i = 0; i < state.size(); ++i) tensors[i].second.copy_(state[i]);
  const auto whole = make_tensor(buffer, {layout.rows, layout.cols});
  return make_view(whole, size, stride, storage_offset);
}

/// What unpack() makes of the same arguments once they are read: zeros until then.
Tensor unpack_later(const Tensor& bytes, const OptionalTensor& pending, at::IntArrayRef fields,
                    c10::string_view format, at::IntArrayRef size, at::IntArrayRef stride,
                    int64_t storage_offset, at::ScalarType dtype, at::TensorList state) {
  check_key_is_ours("qshard::_unpack_later");
  PlainGuard guard;
  const SavedTensor saved{bytes, pending,          fields,         {format.data(), format.size()},
                          size,  stride,           storage_offset, dtype,
                          state, /*is_read=*/false};
  const Layout layout = checked_layout(saved);
  auto buffer = make_buffer(layout, dtype, fields[kKeepsMaster] != 0, bytes.device());
  return make_view(make_tensor(std::move(buffer), {layout.rows, layout.cols}), size, stride,
                   storage_offset);
}

/// Fills what unpack_later() made of the same arguments.
void unpack_into(const Tensor& self, const Tensor& bytes, const OptionalTensor& pending,
                 at::IntArrayRef fields, c10::string_view format, at::IntArrayRef size,
                 at::IntArrayRef stride, int64_t storage_offset, at::ScalarType dtype,
                 at::TensorList state) {
  const Tensor read =
      unpack(bytes, pending, fields, format, size, stride, storage_offset, dtype, state);
  buffer_of(self).check_is_allocated();
  bump_version(self);
  buffer_of(self).fill_from(buffer_of(read));
}

/// The memory of `self`, for processes that share it: the master, `[image | grid]` and a pending
/// write as plain tensors, what describes them, and the state.
std::tuple<OptionalTensor, Tensor, OptionalTensor, std::vector<int64_t>, std::string,
           std::vector<Tensor>>
shared_planes(const Tensor& self) {
  PlainGuard guard;
  QuantizedBuffer& buffer = buffer_of(self);
  const auto defined = [](const Tensor& tensor) {
    return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
  };
  const PlaneAccess access(buffer);
  const Tensor codes = access.code_bytes();
  const Tensor master = access.master();
  // Behind the last scale nothing was written yet, and it is sent.
  const int64_t grid_bytes = buffer.layout().grid_numel() * static_cast<int64_t>(sizeof(float));
  const int64_t padding = round_up(grid_bytes, 16) - grid_bytes;
  if (padding > 0) codes.narrow(0, codes.numel() - padding, padding).zero_();
  std::vector<Tensor> state;
  for (const auto& [name, tensor] : buffer.scaling_state().tensors()) state.push_back(tensor);
  return {defined(master),
          codes,
          defined(access.pending()),
          fields_of(buffer),
          std::string(buffer.layout().format->name),
          state};
}

Tensor over_shared_planes(const OptionalTensor& master, const Tensor& codes,
                          const OptionalTensor& pending, at::IntArrayRef fields,
                          c10::string_view format, at::IntArrayRef size, at::IntArrayRef stride,
                          int64_t storage_offset, at::ScalarType dtype, at::TensorList state) {
  check_key_is_ours("qshard::_over_shared_planes");
  PlainGuard guard;
  const SavedTensor saved{codes, pending, fields,         {format.data(), format.size()},
                          size,  stride,  storage_offset, dtype,
                          state};
  const Layout layout = checked_shared_layout(saved, master);
  Placement placement(layout);
  if (fields[kIsAdopted] != 0) placement.adopt(Groups());
  auto buffer = make_buffer_over_planes(placement, dtype, master.value_or(Tensor()), codes,
                                        pending.value_or(Tensor()), ScalingState::of(layout, state),
                                        fields[kWritten] != 0);
  return make_view(make_tensor(buffer, {layout.rows, layout.cols}), size, stride, storage_offset);
}

/// A tensor like `self` over a copy of its whole buffer.
Tensor copy_buffer_op(const Tensor& self) {
  QuantizedBuffer& buffer = buffer_of(self);
  c10::OptionalDeviceGuard device_guard(self.device());
  auto copy =
      copy_buffer(buffer, {buffer.dtype(), buffer.device(), false, false, /*keeps_adoption=*/true});
  return make_tensor(std::move(copy), {buffer.layout().rows, buffer.layout().cols});
}

/// What _to_copy does not do for tensors that are to be values: quantized in a wider dtype, and on
/// meta, where BackendSelect leads past us. Codes, placement and state are kept.
Tensor copy_to(const Tensor& self, at::ScalarType dtype, at::Device device) {
  QuantizedBuffer& buffer = buffer_of(self);
  TORCH_CHECK_TYPE(is_value_dtype(dtype),
                   fmt::format("qshard::_copy_to: a quantized tensor cannot be {}; it can be "
                               "float32, bfloat16 or float16",
                               c10::toString(dtype)));
  const auto gpus = static_cast<int64_t>(device.is_cuda() && at::hasCUDA() ? at::getNumGPUs() : 0);
  TORCH_CHECK(!device.is_cuda() || device.index() < gpus, "qshard::_copy_to: there is no device ",
              device);
  c10::OptionalDeviceGuard device_guard(device.is_meta() ? self.device() : device);
  auto copy = copy_buffer(buffer, {dtype, device});
  return make_tensor(std::move(copy), self.sizes(), self.strides(), self.storage_offset());
}

}  // namespace

TORCH_LIBRARY_IMPL(qshard, CompositeExplicitAutograd, m) {
  implement<"_copy_buffer", &copy_buffer_op, Takes::kValuesOrMeta>(m);
  implement<"_copy_to", &copy_to, Takes::kValuesOrMeta>(m);
  implement<"_export_view", &export_view, Takes::kAnything>(m);
  implement<"_is_export", &is_export, Takes::kAnything>(m);
  implement<"_has_pending_update", &has_pending_update, Takes::kAnything>(m);
  implement<"_shared_planes", &shared_planes, Takes::kValuesOrMeta>(m);
  implement<"_over_shared_planes", &over_shared_planes, Takes::kAnything>(m);
  implement<"_pack", &pack, Takes::kValuesOrMeta>(m);
  implement<"_unpack", &unpack, Takes::kAnything>(m);
  implement<"_unpack_later", &unpack_later, Takes::kAnything>(m);
  implement<"_unpack_into", &unpack_into, Takes::kAnything>(m);
}

}  // namespace qshard
