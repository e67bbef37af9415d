#include "dispatch/buffer/packed_planes.h"

#include <utility>

#include "dispatch/buffer/make_buffer.h"
#include "dispatch/buffer/read_codes.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/parts/storage.h"

namespace qshard {
namespace {

constexpr int64_t kPlaneAlignment = 16;

/// The planes within packed bytes; undefined where there is none.
struct PackedPlanes {
  at::Tensor image, master, grid;

  PackedPlanes(const at::Tensor& bytes, const Layout& layout, at::ScalarType dtype,
               bool keeps_master) {
    const c10::Storage& storage = bytes.storage();
    int64_t offset = bytes.storage_offset();
    image = tensor_at(storage, at::kByte, offset, {layout.rows, layout.row_bytes()});
    offset += round_up(layout.image_bytes(), kPlaneAlignment);
    if (keeps_master) {
      master = tensor_at(storage, dtype, offset, {layout.rows, layout.cols});
      offset += round_up(bytes_of_master(layout, dtype), kPlaneAlignment);
    }
    if (layout.format->has_grid()) {
      grid = tensor_at(storage, at::kFloat, offset, {layout.grid_rows(), layout.grid_cols()});
    }
  }
};

}  // namespace

int64_t packed_bytes(const Layout& layout, at::ScalarType dtype, bool keeps_master) {
  const int64_t master =
      keeps_master ? round_up(bytes_of_master(layout, dtype), kPlaneAlignment) : 0;
  return bytes_of_codes(layout) + master;
}

at::Tensor pack_planes(QuantizedBuffer& buffer) {
  PlainGuard guard;
  buffer.check_is_allocated();
  buffer.materialize();
  const Layout& layout = buffer.layout();
  const at::ScalarType dtype = buffer.dtype();
  const bool keeps_master = buffer.keeps_master();
  const Planes& planes = buffer.planes();
  const auto bytes =
      at::zeros({packed_bytes(layout, dtype, keeps_master)}, planes.image().options());
  const PackedPlanes packed(bytes, layout, dtype, keeps_master);
  packed.image.copy_(planes.image().operand());
  if (keeps_master) {
    check_master_is_allocated(planes, layout, dtype);
    packed.master.copy_(planes.master().operand());
  }
  if (planes.grid().defined()) packed.grid.copy_(planes.grid().read().operand());
  return bytes;
}

BufferPtr unpack_planes(const at::Tensor& bytes, const at::Tensor& pending,
                        const Placement& placement, at::ScalarType dtype, bool keeps_master,
                        bool is_written) {
  PlainGuard guard;
  const Layout& layout = placement.layout();
  auto planes = Planes::allocate(layout, dtype, keeps_master, bytes.device(), Fill::kNothing);
  // A clone has memory of its own, which the allocator aligns to 16 bytes.
  const PackedPlanes packed(bytes.clone(), layout, dtype, keeps_master);
  planes.write_image().copy_(packed.image);
  if (keeps_master) planes.write_master().copy_(packed.master);
  if (packed.grid.defined()) planes.own_grid(layout).write().copy_(packed.grid);
  if (pending.defined()) planes.set_pending(pending.clone(at::MemoryFormat::Contiguous));
  auto buffer = c10::make_intrusive<QuantizedBuffer>(placement, dtype, std::move(planes),
                                                     ScalingState::fresh(layout, bytes.device()));
  restore_flush_state(*buffer, is_written);
  return buffer;
}

}  // namespace qshard
