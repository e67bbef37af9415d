// What checkpoints, pickles and deepcopy take a quantized tensor apart into.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "dispatch/flush.h"
#include "dispatch/kernel_bridge.h"
#include "dispatch/quantized_tensor_impl.h"
#include "dispatch/registration.h"
#include "kernels/formats.h"

namespace qshard {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

/// Order of the integers in a packed tensor's `layout` list. Saved files hold these: append only.
enum LayoutField {
  kRows,
  kCols,
  kLogicalRows,
  kMatrixRows,
  kRowOffset,
  kKeepsMaster,
  kDirty,
  kImages,  // files from before formats of two row images lack it
  kFields
};

Tensor export_view(const Tensor& self) { return make_export_view(self); }

bool is_export(const Tensor& self) { return is_quantized(self) && impl_of(self).is_export(); }

/// Whether the packed storage alone would lose a write: one that only a collective can flush.
bool has_pending_update(const Tensor& self) {
  const QuantizedBuffer& buffer = buffer_of(self);
  return !buffer.is_shown() && !buffer.keeps_master() && !buffer.can_flush_alone();
}

/// The exact planes of the whole buffer behind `self`, and a write that no flush has reached yet.
std::tuple<Tensor, OptionalTensor, std::vector<int64_t>, std::string, std::vector<Tensor>> pack(
    const Tensor& self) {
  QuantizedBuffer& buffer = buffer_of(self);
  PlainGuard guard;
  const Tensor bytes = buffer.pack();
  const Layout& layout = buffer.layout();
  std::vector<int64_t> fields(kFields);
  fields[kRows] = layout.rows;
  fields[kCols] = layout.cols;
  fields[kLogicalRows] = layout.logical_rows;
  fields[kMatrixRows] = layout.matrix_rows;
  fields[kRowOffset] = layout.row_offset;
  fields[kKeepsMaster] = buffer.keeps_master();
  fields[kDirty] = buffer.is_written();
  fields[kImages] = static_cast<int64_t>(layout.images);
  std::vector<Tensor> state;
  for (const auto& [name, tensor] : buffer.scaling_state().tensors()) {
    state.push_back(tensor.clone());
  }
  return {bytes,
          buffer.pending().defined() ? OptionalTensor(buffer.pending().clone()) : std::nullopt,
          fields, std::string(layout.format->name), state};
}

/// @throws c10::Error if the fields do not describe `bytes`: files come from anywhere.
Tensor unpack(const Tensor& bytes, const OptionalTensor& pending, at::IntArrayRef fields,
              c10::string_view format, at::IntArrayRef size, at::IntArrayRef stride,
              int64_t storage_offset, at::ScalarType dtype, at::TensorList state) {
  check_key_is_ours("qshard::_unpack");
  PlainGuard guard;
  TORCH_CHECK((fields.size() == kFields || fields.size() == kImages) &&
                  bytes.scalar_type() == at::kByte && bytes.dim() == 1 && is_value_dtype(dtype) &&
                  size.size() == stride.size(),
              "qshard: this is not a saved quantized tensor");
  Layout layout;
  layout.format = &find_format(std::string_view(format.data(), format.size()));
  layout.rows = fields[kRows];
  layout.cols = fields[kCols];
  layout.logical_rows = fields[kLogicalRows];
  layout.matrix_rows = fields[kMatrixRows];
  layout.row_offset = fields[kRowOffset];
  const int64_t images = fields.size() > kImages ? fields[kImages] : 0;
  constexpr int64_t kLimit = int64_t{1} << 40;
  for (const auto field : {layout.rows, layout.cols, layout.logical_rows, layout.matrix_rows}) {
    TORCH_CHECK(field >= 0 && field < kLimit,
                "qshard: a saved quantized tensor has an impossible size");
  }
  TORCH_CHECK(layout.row_offset >= Layout::kUnplaced && layout.row_offset <= layout.logical_rows &&
                  (layout.matrix_rows == 0 ? layout.logical_rows == 0
                                           : layout.logical_rows % layout.matrix_rows == 0),
              "qshard: a saved quantized tensor has an impossible placement");
  const Images most = layout.format->columnwise ? Images::kColumnwise : Images::kAll;
  TORCH_CHECK(layout.fits() && images >= 0 && images <= static_cast<int64_t>(most),
              "qshard: a saved quantized tensor has row images that its format does not have");
  layout.images = static_cast<Images>(images);
  if (pending) {
    TORCH_CHECK(pending->sizes() == at::IntArrayRef({layout.rows, layout.cols}) &&
                    pending->scalar_type() == dtype,
                "qshard: the pending update of a saved quantized tensor does not fit it");
  }
  auto buffer = QuantizedBuffer::unpack(bytes, pending.value_or(Tensor()), Placement(layout), dtype,
                                        fields[kKeepsMaster] != 0, fields[kDirty] != 0);
  const auto tensors = buffer->scaling_state().tensors();
  TORCH_CHECK(tensors.size() == state.size(),
              "qshard: a saved quantized tensor lacks the state of its format");
  for (size_t i = 0; i < state.size(); ++i) {
    const Tensor& to = tensors[i].second;
    TORCH_CHECK(to.sizes() == state[i].sizes() && to.scalar_type() == state[i].scalar_type(),
                fmt::format("qshard: the {} of a saved quantized tensor does not fit its format",
                            tensors[i].first));
    to.copy_(state[i]);
  }
  const auto whole = make_tensor(buffer, {layout.rows, layout.cols});
  return make_view(whole, size, stride, storage_offset);
}

/// A tensor like `self` over a copy of its whole buffer.
Tensor copy_buffer(const Tensor& self) {
  QuantizedBuffer& buffer = buffer_of(self);
  c10::OptionalDeviceGuard device_guard(self.device());
  return make_tensor(buffer.copy(), {buffer.layout().rows, buffer.layout().cols});
}

}  // namespace

TORCH_LIBRARY_IMPL(qshard, CompositeExplicitAutograd, m) {
  m.impl("_copy_buffer", &copy_buffer);
  m.impl("_export_view", &export_view);
  m.impl("_is_export", &is_export);
  m.impl("_has_pending_update", &has_pending_update);
  m.impl("_pack", &pack);
  m.impl("_unpack", &unpack);
}

}  // namespace qshard
