#include "dispatch/buffer/plane_access.h"

#include "dispatch/buffer/buffer_copies.h"
#include "dispatch/buffer/read_codes.h"
#include "dispatch/parts/storage.h"

namespace qshard {

at::Tensor PlaneAccess::image() const { return buffer_.planes_.write_image(); }

at::Tensor PlaneAccess::grid() const {
  buffer_.materialize();
  buffer_.check_is_allocated();
  return buffer_.planes_.own_grid(buffer_.layout()).shared();
}

at::Tensor PlaneAccess::code_bytes() const {
  grid();
  const Layout& layout = buffer_.layout();
  if (!buffer_.planes().has_code_storage(layout)) {  // FSDP's, or sent here
    const BufferPtr copy = copy_buffer(buffer_);
    return PlaneAccess(*copy).code_bytes();
  }
  return tensor_at(buffer_.planes().code_storage(), at::kByte, 0, {bytes_of_codes(layout)});
}

at::Tensor PlaneAccess::master() const {
  buffer_.materialize();
  if (!buffer_.planes().master().defined()) return {};
  check_master_is_allocated(buffer_.planes(), buffer_.layout(), buffer_.dtype());
  return buffer_.planes_.write_master();
}

at::Tensor PlaneAccess::pending() const { return buffer_.planes_.write_pending(); }

at::Tensor PlaneAccess::watched(at::Tensor plane) const {
  if (!plane.is_inference()) {
    plane.unsafeGetTensorImpl()->set_version_counter(buffer_.counters().of_codes());
  }
  return plane;
}

}  // namespace qshard
