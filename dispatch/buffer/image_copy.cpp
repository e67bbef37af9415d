#include "dispatch/buffer/image_copy.h"

#include <utility>

#include "dispatch/buffer/buffer_copies.h"
#include "dispatch/parts/kernel_bridge.h"

namespace qshard {
ImageCopy::ImageCopy(QuantizedBuffer& original, Planes planes)
    : QuantizedBuffer(original.placement(), original.dtype(), std::move(planes)),
      link_(Link{c10::weak_intrusive_ptr<QuantizedBuffer>(Ptr::reclaim_copy(&original)),
                 original.flush_state().writes(), original.keeps_master()}) {
  flush_state().join(/*generation=*/0);  // it has no image yet
}

ImageCopy::CopyPtr ImageCopy::of(QuantizedBuffer& original, at::Device device) {
  PlainGuard guard;
  original.check_is_allocated();
  notice_unseen_write(original.flush_state(), original.device());
  const Layout& layout = original.layout();
  const auto bytes =
      at::empty({layout.image_bytes()}, at::TensorOptions().dtype(at::kByte).device(device));
  Grid grid;
  if (original.planes().grid().defined()) {
    const ReadOnlyTensor& known = original.planes().grid().read();
    grid = Grid::owned(at::empty(known.sizes(), known.options().device(device)));
  }
  auto copy =
      c10::make_intrusive<ImageCopy>(original, Planes::over_image(bytes, std::move(grid), layout));
  if (!original.image_copies_) original.image_copies_ = std::make_unique<ImageCopies>();
  original.image_copies_->add(copy);
  if (ScalingState& state = original.scaling_state(); state.is_defined()) {
    if (state.device() != device) state = state.copy_to(device);
    copy->scaling_state() = state;
  }
  if (original.flush_state().codes_current()) {
    copy->refresh();
  } else {
    // Nothing worth sending yet: the flush comes first.
    copy->flush_state().restore(/*written=*/true, /*codes_current=*/false,
                                original.flush_state().may_differ());
  }
  return copy;
}

bool ImageCopy::keeps_master() const {
  return link_ ? link_->keeps_master : QuantizedBuffer::keeps_master();
}

BufferPtr ImageCopy::original() {
  if (!link_) return QuantizedBuffer::original();
  auto original = link_->original.lock();
  TORCH_CHECK(original, "qshard: the original of this device copy of a quantized tensor is gone");
  return original;
}

void ImageCopy::refresh() {
  PlainGuard guard;
  const Ptr from = original();
  link_->writes = from->flush_state().writes();
  const FlushState& state = from->flush_state();
  flush_state().restore(state.is_written_here(), state.codes_current(), state.may_differ());
  const int64_t generation = from->generation();
  if (this->generation() == generation) return;
  from->flush_state().flushed().wait();
  planes_.write_image().copy_(from->planes().image().operand(), /*non_blocking=*/true);
  Grid& grid = planes_.own_grid(layout());
  if (grid.defined()) {
    grid.write().copy_(from->planes().grid().read().operand(), /*non_blocking=*/true);
  }
  flush_state().join(generation);
}

void ImageCopy::materialize() {
  if (link_) materialize_from(*original());
}

void ImageCopy::materialize_from(QuantizedBuffer& from) {
  PlainGuard guard;
  TORCH_CHECK(
      from.flush_state().writes() == link_->writes && !from.flush_state().watch().has_moved(),
      "qshard: this device copy of a quantized tensor was made before the original was written "
      "through its address; copy it again with .to(device)");
  const at::Device here = device();
  const Planes& known = from.planes();
  auto planes = Planes::allocate(layout(), dtype(), from.keeps_master(), here, Fill::kNothing);
  planes.write_image().copy_(known.image().operand());
  if (known.grid().defined()) {
    planes.own_grid(layout()).write().copy_(known.grid().read().operand());
  }
  if (from.keeps_master()) planes.write_master().copy_(from.value().operand());
  if (known.pending().defined()) {
    planes.set_pending(
        known.pending().operand().to(here, dtype(), /*non_blocking=*/false, /*copy=*/true));
  }
  planes_ = std::move(planes);
  flush_state().watch().watch(planes_.memory());
  link_.reset();
  counters().bind_master();
  placement().detach_from_groups();  // as any copy
  scaling_state() = from.scaling_state().copy_to(here);
  note_codes();
  copy_flush_state(*this, from);
}

void ImageCopy::release_resources() {
  QuantizedBuffer::release_resources();
  link_.reset();
}

void QuantizedBuffer::ImageCopies::add(const ImageCopy::CopyPtr& copy) {
  std::erase_if(copies, [](const auto& known) { return known.expired(); });
  copies.emplace_back(copy);
}

void QuantizedBuffer::ImageCopies::materialize(QuantizedBuffer& original) {
  for (const auto& known : std::exchange(copies, {})) {
    if (const auto copy = known.lock(); copy && copy->is_linked()) copy->materialize_from(original);
  }
}

}  // namespace qshard
