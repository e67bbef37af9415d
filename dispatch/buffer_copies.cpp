// Copies of buffers: whole, of rows, of images alone, and into files.
#include <fmt/format.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "dispatch/image_links.h"
#include "dispatch/kernel_bridge.h"
#include "dispatch/quantized_buffer.h"

namespace qshard {
namespace {

constexpr int64_t kPlaneAlignment = 16;

/// Rows of two contiguous planes of the same dtype and width.
void copy_rows(const at::Tensor& to, RowWindow to_rows, const at::Tensor& from, RowWindow from_rows,
               bool non_blocking) {
  if (to.is_cpu() && from.is_cpu()) {
    const size_t row = to.size(1) * to.element_size();
    std::memmove(static_cast<uint8_t*>(to.mutable_data_ptr()) + to_rows.first * row,
                 static_cast<const uint8_t*>(from.const_data_ptr()) + from_rows.first * row,
                 to_rows.count * row);
    return;
  }
  to.narrow(0, to_rows.first, to_rows.count)
      .copy_(from.narrow(0, from_rows.first, from_rows.count), non_blocking);
}

void copy_storage(const c10::Storage& to, const c10::Storage& from) {
  copy_on_device(to.mutable_data(), from.data(), static_cast<int64_t>(from.nbytes()), to.device());
}

}  // namespace

// ------------------------------------------------------------------------------------ whole

void QuantizedBuffer::copy_flush_state(const QuantizedBuffer& other) {
  // A master in another dtype has other amaxes, and so have fewer rows.
  const bool same_values = dtype_ == other.dtype_ &&
                           layout().row_offset == other.layout().row_offset &&
                           layout().live_rows() == other.layout().live_rows();
  flush_state_.copy_of(other.flush_state_, same_values || !keeps_master(), device());
}

BufferPtr QuantizedBuffer::copy() { return copy({dtype_, device()}); }

BufferPtr QuantizedBuffer::copy(const CopyTo& to) {
  PlainGuard guard;
  check_is_allocated();
  complete();
  flush_state_.flushed().wait();
  auto copy = c10::make_intrusive<QuantizedBuffer>(
      Placement(layout()), to.dtype,
      Planes::allocate(layout(), to.dtype, keeps_master(), to.device, Fill::kNothing, to.pinned));
  copy->adopt_parameter(*this);
  if (!to.keeps_adoption) copy->placement_.disown();
  if (copy->is_meta() != is_meta()) {
    TORCH_CHECK(copy->is_meta(),
                "qshard: cannot copy a quantized tensor out of the meta device; there "
                "is no data. Use to_empty() and initialise it");
    copy->flush_state_.restore(is_written(), /*shown=*/true);
    return copy;
  }
  const bool is_bytewise = !to.pinned && !is_meta() && to.dtype == dtype_ && to.device == device();
  if (is_bytewise && planes_.has_code_storage(layout())) {
    copy_storage(copy->planes_.code_storage(), planes_.code_storage());
  } else {
    copy->image().copy_(image(), to.non_blocking);
    if (grid().defined()) copy->grid().write().copy_(grid().read(), to.non_blocking);
  }
  if (master().defined()) check_master_is_allocated();
  if (is_bytewise && master().defined()) {
    copy_storage(copy->storage(), storage());
  } else if (master().defined()) {
    copy->master().copy_(master(), to.non_blocking);
  }
  const bool is_rounded = !keeps_master() && to.dtype != dtype_ && dtype_ != at::kFloat;
  if (pending().defined() || is_rounded) {
    copy->planes_.set_pending(value_plane().to(to.device, to.dtype, to.non_blocking,
                                               /*copy=*/true));
  }
  copy->copy_flush_state(*this);
  // The value is what the codes show, rounded to a narrow dtype, and in another one no codes show
  // just that.
  if (is_rounded) copy->written();
  return copy;
}

// ------------------------------------------------------------------------------------- rows

bool QuantizedBuffer::copy_rows_from(QuantizedBuffer& from, RowWindow to_rows, RowWindow from_rows,
                                     bool non_blocking) {
  from.complete();
  // Codes that this rank alone has made of a pending write are not the value yet.
  if (!from.is_shown() || from.pending().defined()) return false;
  // The same codes show another value in another dtype.
  if (dtype_ != from.dtype_ || (keeps_master() && !from.keeps_master())) return false;

  const int64_t live_rows = layout().live_rows();
  const int64_t generation = from.generation();
  const bool is_same_generation = this->generation() == generation;
  const bool is_whole = live_rows == 0 || (to_rows.first == 0 && to_rows.count >= live_rows);
  // Beside codes that this rank alone made, a pending write is the value of the other rows.
  if (!is_whole && (!is_same_generation || !is_shown() || pending().defined())) return false;

  from.check_is_allocated();
  check_is_allocated();
  complete();
  complete_image_copies();
  from.flush_state_.flushed().wait();
  if (to_rows.count > 0) {
    copy_rows(image(), to_rows, from.image(), from_rows, non_blocking);
    if (keeps_master()) copy_rows(master(), to_rows, from.value_plane(), from_rows, non_blocking);
  }
  if (!is_whole) {
    flush_state_.replace_rows(from.is_written(), /*same_amax=*/!keeps_master());
    return true;
  }
  if (!is_same_generation) {
    planes_.own_grid(layout());
    if (grid().defined()) grid().write().copy_(from.grid().read(), non_blocking);
    scaling_state_.copy_from(from.scaling_state_);
    grid_snapshot_.reset();
  }
  drop_pending();
  copy_flush_state(from);
  return true;
}

BufferPtr QuantizedBuffer::concatenate(const std::vector<std::pair<Ptr, RowWindow>>& pieces) {
  PlainGuard guard;
  const auto& [first, first_rows] = pieces.front();
  int64_t count = 0;
  for (const auto& [piece, rows] : pieces) count += rows.count;
  const int64_t place = first->layout().row_offset + first_rows.first;
  const Layout layout = first->layout().holding(count).placed(place);
  auto whole = allocate_without_scales(layout, first->dtype_, first->keeps_master(),
                                       first->device(), Fill::kNothing);
  int64_t next = 0;
  for (const auto& [piece, rows] : pieces) {
    piece->check_is_allocated();
    piece->complete();
    copy_rows(whole->image(), {next, rows.count}, piece->image(), rows, false);
    if (whole->keeps_master()) {
      copy_rows(whole->master(), {next, rows.count}, piece->master(), rows, false);
    }
    next += rows.count;
  }
  if (whole->grid().defined()) whole->grid().write().copy_(first->grid().read());
  whole->scaling_state_ = first->scaling_state_.copy_to(whole->device());
  whole->placement_.share_scale(first->placement_.scale_group());
  whole->copy_flush_state(*first);
  return whole;
}

// ------------------------------------------------------------------------------- image alone

QuantizedBuffer::ImageLinks& QuantizedBuffer::links() {
  if (!links_) links_ = std::make_unique<ImageLinks>();
  return *links_;
}

BufferPtr QuantizedBuffer::image_copy(const Ptr& from, at::Device device) {
  PlainGuard guard;
  from->check_is_allocated();
  const Layout& layout = from->layout();
  const auto bytes =
      at::empty({layout.image_bytes()}, at::TensorOptions().dtype(at::kByte).device(device));
  Grid grid;
  if (from->grid().defined()) {
    const at::Tensor& known = from->grid().read();
    grid = Grid::owned(at::empty(known.sizes(), known.options().device(device)));
  }
  auto copy = c10::make_intrusive<QuantizedBuffer>(from->placement_, from->dtype_,
                                                   Planes::over_image(bytes, grid, layout));
  copy->is_image_only_ = true;
  copy->original_keeps_master_ = from->keeps_master();
  copy->links().original.emplace(from);
  auto& copies = from->links().copies;
  std::erase_if(copies, [](const auto& known) { return known.expired(); });
  copies.emplace_back(copy);
  if (ScalingState& state = from->scaling_state_; state.is_defined()) {
    if (state.device() != device) state = state.copy_to(device);
    copy->scaling_state_ = state;
  }
  copy->flush_state_.join(/*generation=*/0);  // of no image
  if (from->is_shown()) {
    copy->refresh_from_original();
  } else {
    // Nothing worth sending yet: the flush comes first.
    copy->links().original_writes = from->flush_state_.writes();
    copy->flush_state_.restore(/*written=*/true, /*shown=*/false);
  }
  return copy;
}

BufferPtr QuantizedBuffer::original() {
  if (!is_image_only_) return Ptr::reclaim_copy(this);
  auto original = links_->original->lock();
  TORCH_CHECK(original, "qshard: the original of this device copy of a quantized tensor is gone");
  return original;
}

void QuantizedBuffer::refresh_from_original() {
  PlainGuard guard;
  const Ptr from = original();
  links_->original_writes = from->flush_state_.writes();
  flush_state_.restore(from->is_written(), from->is_shown());
  const int64_t generation = from->generation();
  if (this->generation() == generation) return;
  from->flush_state_.flushed().wait();
  image().copy_(from->image(), /*non_blocking=*/true);
  if (grid().defined()) grid().write().copy_(from->grid().read(), /*non_blocking=*/true);
  grid_snapshot_.reset();
  flush_state_.join(generation);
}

void QuantizedBuffer::complete() {
  if (is_image_only_) take_planes_of(*original());
}

void QuantizedBuffer::take_planes_of(QuantizedBuffer& from) {
  PlainGuard guard;
  TORCH_CHECK(
      from.flush_state_.writes() == links_->original_writes &&
          !from.flush_state_.was_written_unseen(),
      "qshard: this device copy of a quantized tensor was made before the original was written "
      "through its address; copy it again with .to(device)");
  const at::Device here = device();
  auto planes = Planes::allocate(layout(), dtype_, from.keeps_master(), here, Fill::kNothing);
  planes.image().copy_(from.image());
  if (grid().defined()) planes.grid().write().copy_(from.grid().read());
  if (from.keeps_master()) planes.master().copy_(from.value_plane());
  if (from.pending().defined()) {
    planes.set_pending(from.pending().to(here, dtype_, /*non_blocking=*/false, /*copy=*/true));
  }
  planes_ = std::move(planes);
  flush_state_.watch_memory(planes_.memory());
  bind_master_counter();
  is_image_only_ = false;
  placement_.disown();  // as any copy
  links_->original.reset();
  scaling_state_ = from.scaling_state_.copy_to(here);
  note_codes();
  grid_snapshot_.reset();
  copy_flush_state(from);
}

void QuantizedBuffer::complete_image_copies() {
  if (!links_) return;
  for (const auto& known : std::exchange(links_->copies, {})) {
    if (const Ptr copy = known.lock(); copy && copy->is_image_only_) copy->take_planes_of(*this);
  }
}

void QuantizedBuffer::release_resources() {
  try {
    complete_image_copies();
  } catch (const std::exception&) {
    // Out of memory, say. Such a copy names what it lacks when it is used.
  }
  planes_.release();
  scaling_state_ = {};
  grid_snapshot_.reset();
  gather_.reset();
  flush_state_.release();
  links_.reset();
}

// ------------------------------------------------------------------------------------ files

int64_t QuantizedBuffer::packed_bytes(const Layout& layout, at::ScalarType dtype,
                                      bool keeps_master) {
  const int64_t master =
      keeps_master ? round_up(Planes::master_bytes(layout, dtype), kPlaneAlignment) : 0;
  return Planes::code_bytes(layout) + master;
}

namespace {

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
      offset += round_up(Planes::master_bytes(layout, dtype), kPlaneAlignment);
    }
    if (layout.format->has_grid()) {
      grid = tensor_at(storage, at::kFloat, offset, {layout.grid_rows(), layout.grid_cols()});
    }
  }
};

}  // namespace

at::Tensor QuantizedBuffer::pack() {
  PlainGuard guard;
  check_is_allocated();
  complete();
  const auto bytes = at::zeros({packed_bytes(layout(), dtype_, keeps_master())}, image().options());
  const PackedPlanes packed(bytes, layout(), dtype_, keeps_master());
  packed.image.copy_(image());
  if (keeps_master()) check_master_is_allocated();
  if (keeps_master()) packed.master.copy_(master());
  if (grid().defined()) packed.grid.copy_(grid().read());
  return bytes;
}

BufferPtr QuantizedBuffer::unpack(const at::Tensor& bytes, const at::Tensor& pending,
                                  const Placement& placement, at::ScalarType dtype,
                                  bool keeps_master, bool is_written) {
  PlainGuard guard;
  const Layout& layout = placement.layout();
  auto buffer =
      allocate_without_scales(layout, dtype, keeps_master, bytes.device(), Fill::kNothing);
  buffer->placement_ = placement;
  // Of memory of its own: 16-byte alignment is the allocator's.
  const PackedPlanes packed(bytes.clone(), layout, dtype, keeps_master);
  buffer->image().copy_(packed.image);
  if (keeps_master) buffer->master().copy_(packed.master);
  if (packed.grid.defined()) buffer->grid().write().copy_(packed.grid);
  if (pending.defined()) buffer->planes_.set_pending(pending.clone(at::MemoryFormat::Contiguous));
  // Codes that a local flush made stand for their value: quantizing that again gives other bytes.
  const bool has_value = pending.defined() || keeps_master;
  buffer->flush_state_.restore(is_written, /*shown=*/!(is_written && has_value));
  return buffer;
}

void QuantizedBuffer::fill_from(QuantizedBuffer& from) {
  PlainGuard guard;
  const Layout& other = from.layout();
  TORCH_CHECK(layout().format == other.format && layout().images == other.images &&
                  layout().rows == other.rows && layout().cols == other.cols &&
                  layout().grid_numel() == other.grid_numel() && dtype_ == from.dtype_ &&
                  device() == from.device() && keeps_master() == from.keeps_master(),
              "qshard::_unpack_into: the tensor was not made of the description that it is to be "
              "filled by; give it what _unpack_later() made of the same arguments");
  placement_ = from.placement_;
  image().copy_(from.image());
  write_codes();
  if (grid().defined()) grid().write().copy_(from.grid().read());
  if (keeps_master()) master().copy_(from.master());
  planes_.set_pending(from.pending());
  scaling_state_.copy_from(from.scaling_state_);
  grid_snapshot_.reset();
  copy_flush_state(from);
}

at::Tensor QuantizedBuffer::code_bytes() {
  check_is_allocated();
  write_codes();
  if (!planes_.has_code_storage(layout())) return copy()->code_bytes();  // FSDP's, or sent here
  return tensor_at(planes_.code_storage(), at::kByte, 0, {Planes::code_bytes(layout())});
}

BufferPtr QuantizedBuffer::over_planes(const Placement& placement, at::ScalarType dtype,
                                       const at::Tensor& master, const at::Tensor& codes,
                                       const at::Tensor& pending, ScalingState state,
                                       bool is_written) {
  auto buffer = c10::make_intrusive<QuantizedBuffer>(
      placement, dtype, Planes::over(master, codes, placement.layout(), dtype));
  const bool has_value = master.defined() || pending.defined();
  buffer->planes_.set_pending(pending);
  buffer->scaling_state_ = std::move(state);
  buffer->flush_state_.restore(is_written, /*shown=*/!(is_written && has_value));
  return buffer;
}

}  // namespace qshard
