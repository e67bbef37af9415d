#include "dispatch/quantized_buffer.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "dispatch/image_links.h"
#include "dispatch/kernel_bridge.h"
#include "kernels/quantize.h"

namespace qshard {

QuantizedBuffer::QuantizedBuffer(Placement placement, at::ScalarType dtype, Planes planes)
    : placement_(std::move(placement)), dtype_(dtype), planes_(std::move(planes)) {
  flush_state_.watch_memory(planes_.memory());
  note_codes();
}

QuantizedBuffer::~QuantizedBuffer() = default;

namespace {

/// Whether a plane's storage has the bytes of the plane, which ends it.
bool holds(const at::Tensor& plane, int64_t bytes) {
  const auto begin = plane.storage_offset() * static_cast<int64_t>(plane.element_size());
  return static_cast<int64_t>(plane.storage().nbytes()) >= begin + bytes;
}

}  // namespace

// ------------------------------------------------------------------------------------- made

void QuantizedBuffer::fill_unit_scales() {
  const at::Tensor& grid = planes_.grid().write();
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
  auto buffer = c10::make_intrusive<QuantizedBuffer>(
      Placement(layout), dtype, Planes::allocate(layout, dtype, keeps_master, device, fill));
  buffer->scaling_state_ = ScalingState::fresh(layout, device);
  return buffer;
}

BufferPtr QuantizedBuffer::of_values(const Placement& placement, const at::Tensor& values,
                                     bool keeps_master) {
  PlainGuard guard;
  const at::Device device = values.device();
  const auto dtype = values.scalar_type();
  auto buffer = allocate(placement.layout(), dtype, keeps_master, device);
  buffer->placement_ = placement;
  if (!buffer->is_meta()) {
    if (keeps_master) {
      buffer->planes_.master().copy_(values);
    } else {
      buffer->planes_.set_pending(values.contiguous());
    }
  }
  buffer->written();
  return buffer;
}

BufferPtr QuantizedBuffer::of_codes(const Placement& placement, at::ScalarType dtype,
                                    bool keeps_master, const at::Tensor& image,
                                    const at::Tensor& grid) {
  PlainGuard guard;
  auto buffer = allocate_without_scales(placement.layout(), dtype, keeps_master, image.device(),
                                        Fill::kNothing);
  buffer->placement_ = placement;
  if (!buffer->is_meta()) {
    buffer->image().copy_(image);
    if (grid.defined()) buffer->grid().write().copy_(grid);
    if (keeps_master) {
      buffer->master().copy_(buffer->dequantize_rows({0, placement.layout().rows}, dtype));
    }
  }
  buffer->agreed();
  return buffer;
}

BufferPtr QuantizedBuffer::like_rows(QuantizedBuffer& from, const Placement& placement,
                                     at::ScalarType dtype, at::Device device, Fill fill) {
  PlainGuard guard;
  const Layout& layout = placement.layout();
  at::Tensor grid;
  if (from.grid().defined() && !device.is_meta() && !from.is_meta()) {
    grid = from.snapshot_grid();
    if (grid.device() != device) grid = grid.to(device);
  }
  auto buffer = c10::make_intrusive<QuantizedBuffer>(
      placement, dtype,
      Planes::allocate_with_snapshot(grid, layout, dtype, from.keeps_master(), device, fill));
  if (grid.defined()) {
    buffer->grid_snapshot_ = grid;
    // Zero codes are of the template's generation if its scales are theirs; not where rows carry
    // their own scales: these rows have none yet.
    if (layout.format->scales_in_grid()) buffer->flush_state_.join(from.generation());
  } else {
    buffer->fill_unit_scales();
  }
  buffer->scaling_state_ = from.scaling_state_.copy_to(device);
  buffer->flush_state_.restore(from.is_written(), /*shown=*/true);
  return buffer;
}

BufferPtr QuantizedBuffer::without_bytes(const QuantizedBuffer& from, at::ScalarType dtype,
                                         at::Device device) {
  PlainGuard guard;
  auto buffer = c10::make_intrusive<QuantizedBuffer>(
      Placement(from.layout()), dtype, Planes::none(dtype, from.keeps_master(), device));
  buffer->adopt_parameter(from);
  buffer->flush_state_.restore(from.is_written(), /*shown=*/true);
  return buffer;
}

BufferPtr QuantizedBuffer::over_storage(const QuantizedBuffer& from, c10::Storage storage) {
  PlainGuard guard;
  const bool keeps_master = from.keeps_master();
  const Layout& layout = from.layout();
  auto planes = keeps_master ? Planes::around_master(std::move(storage), layout, from.dtype_)
                             : Planes::over_codes(std::move(storage), layout);
  auto buffer =
      c10::make_intrusive<QuantizedBuffer>(from.placement_, from.dtype_, std::move(planes));
  buffer->scaling_state_ = from.scaling_state_;
  buffer->flush_state_.restore(keeps_master || from.is_written(), /*shown=*/!keeps_master);
  return buffer;
}

void QuantizedBuffer::adopt_parameter(const QuantizedBuffer& other) {
  scaling_state_ = other.scaling_state_.copy_to(device());
  placement_.adopt_groups_of(other.placement_);
}

// ------------------------------------------------------------------------------------- read

void QuantizedBuffer::check_is_allocated() const {
  if (is_meta()) return;
  TORCH_CHECK(
      holds(image(), layout().image_bytes()),
      fmt::format("qshard: the storage of this {} tensor was freed: FSDP resharded a gathered one, "
                  "or untyped_storage().resize_() took a shard's. Read it between unshard() and "
                  "reshard(), or before it is freed",
                  layout().format->name));
  TORCH_CHECK(!grid().defined() || holds(grid().read(), layout().grid_numel() * 4),
              fmt::format("qshard: the scales of this {} tensor were freed by "
                          "untyped_storage().resize_(); use it before",
                          layout().format->name));
}

void QuantizedBuffer::check_master_is_allocated() const {
  TORCH_CHECK(is_meta() || holds(master(), Planes::master_bytes(layout(), dtype_)),
              fmt::format("qshard: the storage of this {} tensor, its master, was freed "
                          "(untyped_storage().resize_()); use it before, or fill it again",
                          layout().format->name));
}

void QuantizedBuffer::check_has_value() {
  if (is_image_only_) original();
  if (!master().defined() && !pending().defined()) check_is_allocated();
}

void QuantizedBuffer::check_has_rowwise_image(const char* what) const {
  TORCH_CHECK(
      layout().has_rowwise(),
      fmt::format(
          "qshard: {} of a {} tensor that was gathered in backward: it holds the columnwise "
          "image only, for dgrad. Where backward needs weights for anything else, as "
          "activation checkpointing does, use a recipe with gather=\"both\"",
          what, layout().format->name));
}

at::Tensor QuantizedBuffer::dequantize_rows(RowWindow rows, at::ScalarType out_dtype) const {
  check_has_rowwise_image("the value");
  auto out = at::empty({rows.count, layout().cols}, image().options().dtype(out_dtype));
  if (out.numel() == 0 || is_meta()) return out;
  check_is_allocated();
  c10::OptionalDeviceGuard device_guard(device());
  const DequantizeTask task{layout(),
                            image().const_data_ptr<uint8_t>(),
                            grid().data(),
                            rows.first,
                            rows.count,
                            value_dtype(out_dtype),
                            out.mutable_data_ptr()};
  dequantize({&task, 1}, current_stream(device()));
  return out;
}

// -------------------------------------------------------------------------- values and writes

at::Tensor QuantizedBuffer::value_plane() {
  complete();
  if (!arrivals_.empty()) settle_arrivals();
  if (master().defined()) {
    check_master_is_allocated();
    return master();
  }
  if (pending().defined()) return pending();
  return dequantize_rows({0, layout().rows}, dtype_);
}

at::Tensor QuantizedBuffer::write_plane() {
  complete();
  complete_image_copies();
  if (master().defined()) {
    check_master_is_allocated();
    return master();
  }
  if (!pending().defined()) planes_.set_pending(dequantize_rows({0, layout().rows}, dtype_));
  return pending();
}

void QuantizedBuffer::write_codes() {
  complete();
  check_is_allocated();
  planes_.own_grid(layout());
}

void QuantizedBuffer::written() { flush_state_.write(device()); }

void QuantizedBuffer::written_nothing() {
  complete();  // later, it would take over what the original knows of writes
  flush_state_.write_elsewhere();
  if (master().defined() && !can_flush_alone()) flush_state_.hide();
  note_before_bump();
}

void QuantizedBuffer::written_with_amax(at::Tensor amax, at::Tensor provisional, bool shown) {
  flush_state_.write_with_amax(device(), std::move(amax), std::move(provisional), shown);
  if (shown) grid_snapshot_.reset();
}

void QuantizedBuffer::drop_pending() { planes_.set_pending({}); }

// ------------------------------------------------------------------------------------- flush

void QuantizedBuffer::requantized(at::Tensor snapshot, const FlushEvent& event, Pending keep) {
  flush_state_.requantize(event);
  grid_snapshot_ = std::move(snapshot);
  if (keep == Pending::kKeep) return;
  // The flush may run on another stream than the one `pending` was allocated on (FSDP2's copy-in
  // stream), so the allocator has to be told before it is let go.
  record_on_current_stream(pending());
  drop_pending();
}

void QuantizedBuffer::note_codes() {
  if (master().defined()) return;  // writes to codes are writes to the tensor then
  const c10::VariableVersion& counter = code_counter();
  codes_version_ = counter.enabled() ? counter.current_version() : 0;  // not in inference mode
}

void QuantizedBuffer::notice_written_codes() {
  const bool may_be_other = flush_state_.was_written_unseen();  // inline: each gather asks
  if (may_be_other && flush_state_.notice_other_memory()) grid_snapshot_.reset();
  const uint32_t noted = codes_version_;
  note_codes();
  if (codes_version_ == noted) return;
  grid_snapshot_.reset();
  flush_state_.replace_codes();
}

int64_t QuantizedBuffer::generation() {
  notice_written_codes();
  return flush_state_.generation();
}

const at::Tensor& QuantizedBuffer::snapshot_grid() {
  notice_written_codes();
  // A replay changes the grid, or a graph reads one that a later flush will have changed.
  if (flush_state_.may_be_replayed() || is_capturing(device())) grid_snapshot_.reset();
  if (grid().defined() && !grid_snapshot_.defined()) {
    PlainGuard guard;
    grid_snapshot_ = grid().read().clone();
    record_on_default_stream(grid_snapshot_);
  }
  return grid_snapshot_;
}

// --------------------------------------------------------------------------------- placement

void QuantizedBuffer::adopt(std::string_view group) {
  placement_.adopt(group);
  if (is_image_only_) original()->placement_.adopt(group);
}

void QuantizedBuffer::adopt(const Groups& groups) {
  placement_.adopt(groups);
  if (is_image_only_) original()->placement_.adopt(groups);
}

void QuantizedBuffer::share_scale(const ScaleGroup& group) {
  if (placement_.scale_group() == group) return;
  placement_.share_scale(group);
  flush_state_.write_elsewhere();
}

// ----------------------------------------------------------------------------------- gathers

at::Tensor QuantizedBuffer::begin_gather(Images images) {
  check_is_allocated();
  flush_state_.flushed().wait();
  // A replay is waited for by the stream that it runs on, or by the default one.
  if (flush_state_.may_be_replayed()) wait_for_stream({}, device());
  const Ptr owner = original();
  owner->gather_ = {snapshot_grid(), generation(), images};
  if (images == Images::kAll) return planes_.flat_image();
  const int64_t offset = images == Images::kRowwise ? 0 : layout().columnwise_offset();
  return image().narrow(1, offset, layout().image_row_bytes()).reshape(-1);
}

QuantizedBuffer::Gather QuantizedBuffer::end_gather() {
  TORCH_CHECK(gather_, "qshard: fsdp_post_all_gather without fsdp_pre_all_gather before it");
  return *std::exchange(gather_, std::nullopt);
}

BufferPtr QuantizedBuffer::gathered(QuantizedBuffer& shard, const at::Tensor& bytes,
                                    at::ScalarType dtype) {
  const auto [grid, generation, images] = shard.end_gather();
  const Layout layout = shard.layout().with_images(images);
  // Rows without columns have no bytes to count: there are as many as all ranks hold.
  const int64_t row_bytes = layout.row_bytes();
  const int64_t rows =
      row_bytes > 0 ? bytes.numel() / row_bytes : layout.rows * ranks_of(shard.placement_.group());
  TORCH_CHECK(bytes.scalar_type() == at::kByte && bytes.numel() == rows * row_bytes,
              fmt::format("qshard: gathered {} {} elements are not rows of {} bytes", bytes.numel(),
                          c10::toString(bytes.scalar_type()), row_bytes));
  TORCH_CHECK(!grid.defined() || grid.device() == bytes.device(),
              fmt::format("qshard: bytes on {} were gathered of a shard on {}",
                          bytes.device().str(), grid.device().str()));
  const Layout whole = layout.holding(rows).placed(0);
  auto buffer = c10::make_intrusive<QuantizedBuffer>(
      Placement(whole, Gathered{}), dtype,
      Planes::over_image(bytes.view(-1), Grid::snapshot(grid), whole));
  buffer->flush_state_.join(generation);
  buffer->scaling_state_ = shard.scaling_state_;
  return buffer;
}

void QuantizedBuffer::regather(QuantizedBuffer& shard, const at::Tensor& bytes) {
  if (shard.gather_) {
    const Layout later = layout().with_images(shard.gather_->images);
    const Layout& of_shard = shard.layout();
    TORCH_CHECK(
        !keeps_master() && !is_image_only_ && of_shard.format == later.format &&
            of_shard.cols == later.cols && of_shard.logical_rows == later.logical_rows &&
            bytes.scalar_type() == at::kByte && bytes.is_contiguous() &&
            bytes.numel() == later.image_bytes() && bytes.device() == device(),
        fmt::format("qshard: {} gathered bytes of a {} shard of {} columns are not those of "
                    "a gathered {} tensor of {} x {}",
                    bytes.numel(), of_shard.format->name, of_shard.cols, later.format->name,
                    later.rows, later.cols));
  }
  auto [grid, generation, images] = shard.end_gather();
  placement_.hold(images);
  planes_.replace_image(bytes, Grid::snapshot(std::move(grid)), layout());
  flush_state_.watch_memory(planes_.memory());
  note_codes();
  grid_snapshot_.reset();
  // The shard may be another tensor than in the gather before, as after Module.to().
  scaling_state_ = shard.scaling_state_;
  flush_state_.join(generation);
  flush_state_.agree();
}

// ------------------------------------------------------------------------------------ counter

const c10::VariableVersion& QuantizedBuffer::code_counter() {
  share_counter();
  return (master().defined() ? master() : image()).unsafeGetTensorImpl()->version_counter();
}

void QuantizedBuffer::share_version(c10::TensorImpl& tensor) {
  if (!keeps_master()) return;
  if (tensor.is_inference()) {  // it has none; aliases of the master share the master's own
    if (flush_state_.is_watched() || !master().defined()) return;
    const c10::TensorImpl* owner = master().unsafeGetTensorImpl();
    if (owner->version_counter().enabled()) flush_state_.watch(owner->version_counter(), owner);
    return;
  }
  if (!flush_state_.is_watched()) return flush_state_.watch_sole(tensor);
  share_counter();
  tensor.set_version_counter(flush_state_.version_counter());
}

void QuantizedBuffer::share_counter() {
  if (flush_state_.hold_counter()) bind_master_counter();
}

void QuantizedBuffer::bind_master_counter() {
  if (!master().defined() || !flush_state_.is_watched()) return;
  flush_state_.hold_counter();
  master().unsafeGetTensorImpl()->set_version_counter(flush_state_.version_counter());
}

void QuantizedBuffer::watch(const c10::TensorImpl& tensor) {
  const c10::VariableVersion& counter = tensor.version_counter();
  if (!keeps_master() || !counter.enabled()) return;
  share_counter();
  const bool is_first = !flush_state_.is_watched();
  flush_state_.watch(counter, &tensor);
  if (is_first) bind_master_counter();
}

}  // namespace qshard
