// Rows as bytes, to be sent: codes and the scales of each row's blocks, and tensors of such bytes.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "dispatch/aten/registration.h"
#include "dispatch/buffer/make_buffer.h"
#include "dispatch/buffer/plane_access.h"
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/checked_sizes.h"
#include "kernels/format/whole_layout.h"
#include "ops/calls/ops.h"

namespace qshard {
namespace {

void check_rows(const Format& format, const char* op) {
  TORCH_CHECK_VALUE(
      format.has_rows_of_their_own(),
      fmt::format("{}: rows of {} share scales or have two images; quantize to a format of rows, "
                  "qshard.formats.info_of(format).activations.row_format",
                  op, format.name));
}

}  // namespace

Tensor row_image(const Tensor& self) {
  constexpr const char* kOp = "qshard::row_image";
  TORCH_CHECK_TYPE(has_key(self), fmt::format("{}: expected a quantized tensor, got a plain {} "
                                              "tensor",
                                              kOp, c10::toString(self.scalar_type())));
  QuantizedBuffer& buffer = buffer_of(self);
  check_rows(*buffer.layout().format, kOp);
  const auto rows = row_window(self);
  TORCH_CHECK_VALUE(
      rows && self.dim() >= 2 && self.size(-1) == buffer.layout().cols,
      fmt::format("{}: {} with strides {} is not a window of whole rows; give it a copy, "
                  "x.contiguous()",
                  kOp, describe(self), self.strides().vec()));
  ensure_codes_current(impl_of(self).buffer(), kOp);
  PlainGuard guard;
  const PlaneAccess access(buffer);
  return access.watched(access.image().narrow(0, rows->first, rows->count));
}

Tensor from_row_image(const Tensor& image, c10::string_view format_name, int64_t columns,
                      at::ScalarType dtype) {
  constexpr const char* kOp = "qshard::from_row_image";
  check_key_is_ours(kOp);
  const Format& format = checked_format(format_name, kOp);
  check_rows(format, kOp);
  TORCH_CHECK_TYPE(is_value_dtype(dtype),
                   fmt::format("{}: expected dtype float32, bfloat16 or float16, got {}", kOp,
                               c10::toString(dtype)));
  TORCH_CHECK_TYPE(
      !has_key(image) && image.scalar_type() == at::kByte && image.dim() == 2,
      fmt::format("{}: expected a plain uint8 tensor (rows, bytes), got {}", kOp, describe(image)));
  checked_product(kOp, "columns", {image.size(0), columns});
  const Layout layout = whole_layout(format, image.size(0), columns);
  TORCH_CHECK_VALUE(
      image.size(1) == layout.row_bytes(),
      fmt::format("{}: a row of {} {} columns has {} bytes, got an image of shape {}", kOp, columns,
                  format.name, layout.row_bytes(), image.sizes().vec()));
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(image.device());
  const Tensor own = image.clone(at::MemoryFormat::Contiguous);
  // What GEMMs contract beyond the columns.
  const int64_t padding = layout.row_scale_offset() - layout.code_bytes();
  if (padding > 0 && !own.is_meta()) own.narrow(1, layout.code_bytes(), padding).zero_();
  return make_tensor(
      make_buffer_of_codes(Placement(layout), dtype, /*keeps_master=*/false, own, Tensor()),
      {image.size(0), columns});
}

}  // namespace qshard
