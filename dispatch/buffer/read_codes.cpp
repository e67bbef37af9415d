#include "dispatch/buffer/read_codes.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "dispatch/parts/kernel_bridge.h"
#include "kernels/quantize/quantize.h"

namespace qshard {

at::Tensor dequantized_rows(const Planes& planes, const Layout& layout, RowWindow rows,
                            at::ScalarType out_dtype) {
  check_has_rowwise_image(layout, "the value");
  const at::Device device = planes.device();
  auto out = at::empty({rows.count, layout.cols}, planes.image().options().dtype(out_dtype));
  if (out.numel() == 0 || device.is_meta()) return out;
  check_codes_are_allocated(planes, layout);
  c10::OptionalDeviceGuard device_guard(device);
  const DequantizeTask task{layout,
                            planes.image().const_data_ptr<uint8_t>(),
                            planes.grid().data(),
                            rows.first,
                            rows.count,
                            value_dtype(out_dtype),
                            out.mutable_data_ptr()};
  dequantize({&task, 1}, current_stream(device));
  return out;
}

void check_has_rowwise_image(const Layout& layout, const char* what) {
  TORCH_CHECK(
      layout.has_rowwise(),
      fmt::format(
          "qshard: {} of a {} tensor that was gathered in backward: it holds the columnwise "
          "image only, for dgrad. Where backward needs weights for anything else, as "
          "activation checkpointing does, use a recipe with gather=\"both\"",
          what, layout.format->name));
}

void check_codes_are_allocated(const Planes& planes, const Layout& layout) {
  if (planes.device().is_meta()) return;
  TORCH_CHECK(
      planes.image().has_memory(layout.image_bytes()),
      fmt::format("qshard: the storage of this {} tensor was freed: FSDP resharded a gathered one, "
                  "or untyped_storage().resize_() took a shard's. Read it between unshard() and "
                  "reshard(), or before it is freed",
                  layout.format->name));
  const Grid& grid = planes.grid();
  TORCH_CHECK(!grid.defined() || grid.read().has_memory(layout.grid_numel() * 4),
              fmt::format("qshard: the scales of this {} tensor were freed by "
                          "untyped_storage().resize_(); use it before",
                          layout.format->name));
}

void check_master_is_allocated(const Planes& planes, const Layout& layout, at::ScalarType dtype) {
  TORCH_CHECK(
      planes.device().is_meta() || planes.master().has_memory(bytes_of_master(layout, dtype)),
      fmt::format("qshard: the storage of this {} tensor, its master, was freed "
                  "(untyped_storage().resize_()); use it before, or fill it again",
                  layout.format->name));
}

}  // namespace qshard
