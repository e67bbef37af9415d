#include "dispatch/quantized_buffer.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "dispatch/kernel_bridge.h"
#include "kernels/quantize.h"

namespace qshard {
namespace {

constexpr int64_t kPlaneAlignment = 16;

int64_t master_offset(const Layout& layout) {
  return round_up(layout.image_bytes(), kPlaneAlignment);
}

int64_t master_bytes(const Layout& layout, at::ScalarType dtype, bool keeps_master) {
  return keeps_master ? layout.rows * layout.cols * static_cast<int64_t>(c10::elementSize(dtype))
                      : 0;
}

int64_t grid_offset(const Layout& layout, at::ScalarType dtype, bool keeps_master) {
  return master_offset(layout) +
         round_up(master_bytes(layout, dtype, keeps_master), kPlaneAlignment);
}

at::TensorOptions bytes_on(at::Device device) {
  return at::TensorOptions().dtype(at::kByte).device(device);
}

}  // namespace

int64_t QuantizedBuffer::next_generation() {
  static std::atomic<int64_t> counter{0};
  return ++counter;
}

int64_t QuantizedBuffer::packed_bytes(const Layout& layout, at::ScalarType dtype,
                                      bool keeps_master) {
  return grid_offset(layout, dtype, keeps_master) +
         round_up(layout.grid_numel() * static_cast<int64_t>(sizeof(float)), kPlaneAlignment);
}

at::Tensor QuantizedBuffer::grid_plane(bool keeps_master) const {
  return tensor_at(storage, at::kFloat, grid_offset(layout, dtype, keeps_master),
                   {layout.grid_rows(), layout.grid_cols()});
}

void QuantizedBuffer::bind_planes(c10::Storage packed, bool keeps_master,
                                  const at::Tensor& borrowed_grid) {
  storage = std::move(packed);
  image = tensor_at(storage, at::kByte, 0, {layout.rows, layout.row_bytes()});
  flat_image.reset();
  if (keeps_master) {
    master = tensor_at(storage, dtype, master_offset(layout), {layout.rows, layout.cols});
  }
  borrows_grid = borrowed_grid.defined();
  if (borrows_grid) {
    grid = grid_snapshot = borrowed_grid;
  } else if (layout.format->has_grid()) {
    grid = grid_plane(keeps_master);
  }
  mark_flushed(true);
}

void QuantizedBuffer::fill_unit_scales() {
  if (!grid.defined() || is_meta()) return;
  if (device().is_cpu()) {
    std::fill_n(grid.mutable_data_ptr<float>(), grid.numel(), 1.f);
  } else {
    PlainGuard guard;
    grid.fill_(1.0);
  }
}

BufferPtr QuantizedBuffer::allocate(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                                    at::Device device) {
  auto buffer = allocate_without_scales(layout, dtype, keeps_master, device, Fill::kZeros);
  buffer->fill_unit_scales();
  return buffer;
}

BufferPtr QuantizedBuffer::allocate_without_scales(const Layout& layout, at::ScalarType dtype,
                                                   bool keeps_master, at::Device device,
                                                   Fill fill) {
  PlainGuard guard;
  return allocate_planes({}, layout, dtype, keeps_master, device, fill);
}

BufferPtr QuantizedBuffer::allocate_planes(const at::Tensor& borrowed_grid, const Layout& layout,
                                           at::ScalarType dtype, bool keeps_master,
                                           at::Device device, Fill fill) {
  auto buffer = c10::make_intrusive<QuantizedBuffer>();
  buffer->layout = layout;
  buffer->dtype = dtype;
  buffer->generation = next_generation();
  buffer->bind_planes(allocate_storage(packed_bytes(layout, dtype, keeps_master), device, fill),
                      keeps_master, borrowed_grid);
  buffer->state = ScalingState::fresh(layout, device);
  return buffer;
}

BufferPtr QuantizedBuffer::allocate_borrowing_grid(const at::Tensor& snapshot, const Layout& layout,
                                                   at::ScalarType dtype, bool keeps_master,
                                                   Fill fill) {
  return allocate_planes(snapshot, layout, dtype, keeps_master, snapshot.device(), fill);
}

BufferPtr QuantizedBuffer::from_storage(c10::Storage storage, const Layout& layout,
                                        at::ScalarType dtype, bool keeps_master) {
  PlainGuard guard;
  const int64_t expected = packed_bytes(layout, dtype, keeps_master);
  TORCH_CHECK(
      static_cast<int64_t>(storage.nbytes()) == expected,
      fmt::format("qshard: a storage of {} bytes is not a packed {} tensor of {} x {}, "
                  "which takes {} bytes",
                  storage.nbytes(), layout.format->name, layout.rows, layout.cols, expected));
  auto buffer = c10::make_intrusive<QuantizedBuffer>();
  buffer->layout = layout;
  buffer->dtype = dtype;
  buffer->generation = next_generation();
  buffer->bind_planes(std::move(storage), keeps_master);
  return buffer;
}

BufferPtr QuantizedBuffer::from_image(const at::Tensor& bytes, const at::Tensor& grid,
                                      const Layout& layout, at::ScalarType dtype,
                                      int64_t generation) {
  auto buffer = c10::make_intrusive<QuantizedBuffer>();
  buffer->layout = layout;
  buffer->dtype = dtype;
  buffer->generation = generation;
  buffer->storage = bytes.storage();
  buffer->image = bytes.view({layout.rows, layout.row_bytes()});
  buffer->grid = grid;
  return buffer;
}

at::Tensor QuantizedBuffer::packed() const {
  return tensor_at(storage, at::kByte, 0, {packed_bytes()});
}

bool QuantizedBuffer::is_packed() const {
  return !source && static_cast<int64_t>(storage.nbytes()) == packed_bytes() &&
         (!grid.defined() || grid.storage().is_alias_of(storage));
}

void QuantizedBuffer::own_grid() {
  if (!borrows_grid) return;
  const at::Tensor borrowed = std::move(grid);
  grid = grid_plane(master.defined());
  copy_on_device(grid.mutable_data_ptr(), borrowed.const_data_ptr(),
                 static_cast<int64_t>(borrowed.nbytes()), device());
  borrows_grid = false;
}

bool QuantizedBuffer::master_was_written() const {
  return master.defined() && master._version() != static_cast<int64_t>(seen_master_version_);
}

void QuantizedBuffer::mark_written() {
  dirty = stale = true;
  known_amax.reset();
  ++writes;
}

void QuantizedBuffer::mark_written(const at::Tensor& amax, int64_t first, int64_t count,
                                   bool image_shows_it) {
  mark_written();
  known_amax =
      tensor_at(amax.storage(), at::kFloat, first * static_cast<int64_t>(sizeof(float)), {count});
  if (master.defined()) seen_master_version_ = static_cast<uint32_t>(master._version());
  if (!image_shows_it) return;
  stale = false;
  generation = next_generation();
  grid_snapshot.reset();
}

void QuantizedBuffer::inherit_parameter(const QuantizedBuffer& other) {
  state = other.state.copy_to(device());
  group = other.group;
  replica_groups = other.replica_groups;
}

void QuantizedBuffer::inherit_flags(const QuantizedBuffer& other) {
  mark_flushed(true);
  dirty = other.is_dirty();
  stale = other.is_stale();
  ++writes;
  // A master in another dtype has other amaxes, and so have fewer rows.
  const bool same_values = dtype == other.dtype && layout.row_offset == other.layout.row_offset &&
                           layout.live_rows() == other.layout.live_rows();
  if (other.knows_amax() && (same_values || !keeps_master())) {
    known_amax = other.known_amax.to(device());
  }
}

void QuantizedBuffer::mark_flushed(bool agreed) {
  // A write through an alias of the master is known only by its version: note it before forgetting.
  dirty = !agreed && is_dirty();
  stale = false;
  if (agreed) known_amax.reset();
  if (master.defined()) seen_master_version_ = static_cast<uint32_t>(master._version());
}

void QuantizedBuffer::check_is_allocated() const {
  TORCH_CHECK(
      is_meta() || static_cast<int64_t>(image.storage().nbytes()) >= layout.image_bytes(),
      fmt::format("qshard: the storage of this gathered {} tensor was freed: FSDP resharded "
                  "it. Read it between unshard() and reshard()",
                  layout.format->name));
}

void QuantizedBuffer::check_has_rowwise_image(const char* what) const {
  TORCH_CHECK(
      layout.has_rowwise(),
      fmt::format(
          "qshard: {} of a {} tensor that was gathered in backward: it holds the columnwise "
          "image only, for dgrad. Where backward needs weights for anything else, as "
          "activation checkpointing does, use a recipe with gather=\"both\"",
          what, layout.format->name));
}

at::Tensor QuantizedBuffer::dequantize_rows(int64_t first, int64_t count,
                                            at::ScalarType out_dtype) const {
  check_has_rowwise_image("the value");
  auto out = at::empty({count, layout.cols}, image.options().dtype(out_dtype));
  if (out.numel() == 0 || is_meta()) return out;
  check_is_allocated();
  c10::OptionalDeviceGuard device_guard(device());
  const DequantizeTask task{layout,
                            image.const_data_ptr<uint8_t>(),
                            grid.defined() ? grid.const_data_ptr<float>() : nullptr,
                            first,
                            count,
                            value_dtype(out_dtype),
                            out.mutable_data_ptr()};
  dequantize({&task, 1}, current_stream(device()));
  return out;
}

at::Tensor QuantizedBuffer::value_plane() {
  detach_from_source();
  if (master.defined()) return master;
  if (pending.defined()) return pending;
  return dequantize_rows(0, layout.rows, dtype);
}

at::Tensor QuantizedBuffer::write_plane() {
  detach_from_source();
  if (layout.row_offset == Layout::kOpen) anchor();
  if (master.defined()) return master;
  if (!pending.defined()) pending = dequantize_rows(0, layout.rows, dtype);
  return pending;
}

BufferPtr QuantizedBuffer::image_copy(const Ptr& from, at::Device device) {
  PlainGuard guard;
  auto copy = c10::make_intrusive<QuantizedBuffer>();
  copy->layout = from->layout;
  copy->dtype = from->dtype;
  copy->group = from->group;
  copy->image = at::empty({from->layout.rows, from->layout.row_bytes()}, bytes_on(device));
  copy->storage = copy->image.storage();
  if (from->grid.defined())
    copy->grid = at::empty(from->grid.sizes(), from->grid.options().device(device));
  copy->source = from;
  if (from->state.is_defined()) {
    if (from->state.device() != device) from->state = from->state.copy_to(device);
    copy->state = from->state;
  }
  if (from->is_stale()) {
    // Nothing worth sending yet: the flush comes first.
    copy->source_writes = from->writes;
    copy->dirty = copy->stale = true;
  } else {
    copy->refresh_from_source();
  }
  return copy;
}

void QuantizedBuffer::refresh_from_source() {
  PlainGuard guard;
  source_writes = source->writes;
  dirty = source->is_dirty();
  stale = source->is_stale();
  if (generation == source->generation) return;
  image.copy_(source->image, /*non_blocking=*/true);
  if (grid.defined()) grid.copy_(source->grid, /*non_blocking=*/true);
  grid_snapshot.reset();
  generation = source->generation;
}

void QuantizedBuffer::detach_from_source() {
  if (!source) return;
  PlainGuard guard;
  TORCH_CHECK(
      source->writes == source_writes && !source->master_was_written(),
      "qshard: this device copy of a quantized tensor was made before the original was last "
      "written; copy it again with .to(device)");
  const Ptr from = std::move(source);
  source.reset();
  const auto sent_image = image;
  const auto sent_grid = grid;
  const int64_t bytes = packed_bytes(layout, dtype, from->keeps_master());
  bind_planes(allocate_storage(bytes, device(), Fill::kZeros), from->keeps_master());
  image.copy_(sent_image);
  if (grid.defined()) grid.copy_(sent_grid);
  if (from->keeps_master()) master.copy_(from->value_plane());
  if (from->pending.defined()) pending = from->pending.to(device());
  state = from->state.copy_to(device());
  inherit_flags(*from);
}

void QuantizedBuffer::anchor() {
  Layout own = layout;
  own.logical_rows = layout.rows;
  if (layout.matrix_rows == 0 || layout.rows % layout.matrix_rows != 0) {
    own.matrix_rows = layout.rows;
  }
  own.row_offset = 0;
  TORCH_CHECK(
      own.fits(),
      fmt::format("qshard: {} rows of plain values cannot be written into a new {} tensor, "
                  "which has blocks of {} rows; copy from a quantized tensor, or quantize "
                  "the values in another format",
                  own.matrix_rows, layout.format->name, layout.format->columnwise->block_rows));
  layout = own;
  generation = next_generation();
  bind_planes(allocate_storage(packed_bytes(), device(), Fill::kZeros), master.defined());
  fill_unit_scales();
  grid_snapshot.reset();
  state = ScalingState::fresh(layout, device());
}

void QuantizedBuffer::release_resources() {
  image.reset();
  flat_image.reset();
  master.reset();
  grid.reset();
  pending.reset();
  state = {};
  grid_snapshot.reset();
  gather.reset();
  known_amax.reset();
  source.reset();
}

}  // namespace qshard
