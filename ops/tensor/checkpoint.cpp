// What checkpoints, pickles and deepcopy take a quantized tensor apart into.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "dispatch/aten/registration.h"
#include "dispatch/buffer/buffer_copies.h"
#include "dispatch/buffer/make_buffer.h"
#include "dispatch/buffer/packed_planes.h"
#include "dispatch/buffer/plane_access.h"
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "ops/tensor/saved_tensor.h"

namespace qshard {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

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
  if (is_one_range(layout)) {
    fields.resize(kRowsOfEach);
  } else {
    fields[kRowsOfEach] = layout.rows_of_each;
  }
  return fields;
}

Tensor view_of(const SavedTensor& saved, const Layout& layout, BufferPtr buffer) {
  return make_view(make_tensor(std::move(buffer), {layout.rows, layout.cols}), saved.size,
                   saved.stride, saved.storage_offset);
}

}  // namespace

Tensor export_view(const Tensor& self) { return make_export_view(self); }

bool is_export(const Tensor& self) { return is_quantized(self) && impl_of(self).is_export(); }

bool has_pending_update(const Tensor& self) {
  const QuantizedBuffer& buffer = buffer_of(self);
  return !buffer.flush_state().codes_current() && !buffer.keeps_master() &&
         !buffer.placement().is_alone();
}

PackedTensor pack(const Tensor& self) {
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

Tensor read_saved(const c10::intrusive_ptr<SavedTensor>& saved) {
  check_key_is_ours("qshard::SavedTensor.read");
  PlainGuard guard;
  const Layout layout = checked_layout(*saved, /*is_read=*/true);
  Placement placement(layout);
  if (is_adopted(*saved, layout)) placement.adopt(Groups());
  const std::vector<int64_t>& fields = saved->layout;
  auto buffer = unpack_planes(saved->bytes, saved->pending.value_or(Tensor()), placement,
                              saved->dtype, fields[kKeepsMaster] != 0, fields[kWritten] != 0);
  const auto tensors = buffer->scaling_state().tensors();
  for (size_t i = 0; i < saved->state.size(); ++i) tensors[i].second.copy_(saved->state[i]);
  return view_of(*saved, layout, std::move(buffer));
}

Tensor read_saved_later(const c10::intrusive_ptr<SavedTensor>& saved) {
  check_key_is_ours("qshard::SavedTensor.read_later");
  PlainGuard guard;
  const Layout layout = checked_layout(*saved, /*is_read=*/false);
  return view_of(
      *saved, layout,
      make_buffer(layout, saved->dtype, saved->layout[kKeepsMaster] != 0, saved->bytes.device()));
}

void read_saved_into(const c10::intrusive_ptr<SavedTensor>& saved, const Tensor& tensor) {
  const Tensor source = read_saved(saved);
  buffer_of(tensor).check_is_allocated();
  bump_version(tensor);
  buffer_of(tensor).fill_from(buffer_of(source));
}

SharedPlanes shared_planes(const Tensor& self) {
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

Tensor over_shared_planes(const c10::intrusive_ptr<SavedTensor>& saved,
                          const OptionalTensor& master) {
  check_key_is_ours("qshard::SavedTensor.over_shared_planes");
  PlainGuard guard;
  const Layout layout = checked_shared_layout(*saved, master);
  Placement placement(layout);
  if (saved->layout[kIsAdopted] != 0) placement.adopt(Groups());
  auto buffer =
      make_buffer_over_planes(placement, saved->dtype, master.value_or(Tensor()), saved->bytes,
                              saved->pending.value_or(Tensor()),
                              ScalingState::of(layout, saved->state), saved->layout[kWritten] != 0);
  return view_of(*saved, layout, std::move(buffer));
}

Tensor copy_buffer_op(const Tensor& self) {
  QuantizedBuffer& buffer = buffer_of(self);
  c10::OptionalDeviceGuard device_guard(self.device());
  auto copy =
      copy_buffer(buffer, {buffer.dtype(), buffer.device(), false, false, /*keeps_adoption=*/true});
  return make_tensor(std::move(copy), {buffer.layout().rows, buffer.layout().cols});
}

Tensor copy_to(const Tensor& self, at::ScalarType dtype, at::Device device) {
  QuantizedBuffer& buffer = buffer_of(self);
  TORCH_CHECK_TYPE(
      is_value_dtype(dtype),
      fmt::format("qshard::TensorState.copy_to: a quantized tensor cannot be {}; it can be "
                  "float32, bfloat16 or float16",
                  c10::toString(dtype)));
  const auto gpus = static_cast<int64_t>(device.is_cuda() && at::hasCUDA() ? at::getNumGPUs() : 0);
  TORCH_CHECK(!device.is_cuda() || device.index() < gpus,
              "qshard::TensorState.copy_to: there is no device ", device);
  c10::OptionalDeviceGuard device_guard(device.is_meta() ? self.device() : device);
  auto copy = copy_buffer(buffer, {dtype, device});
  return make_tensor(std::move(copy), self.sizes(), self.strides(), self.storage_offset());
}

}  // namespace qshard
