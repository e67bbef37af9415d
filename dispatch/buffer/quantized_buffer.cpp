#include "dispatch/buffer/quantized_buffer.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "dispatch/buffer/buffer_copies.h"
#include "dispatch/buffer/image_copy.h"
#include "dispatch/buffer/read_codes.h"
#include "dispatch/parts/kernel_bridge.h"
#include "kernels/checks/first_use.h"
#include "kernels/device/capture.h"

namespace qshard {

QuantizedBuffer::QuantizedBuffer(Placement placement, at::ScalarType dtype, Planes planes,
                                 ScalingState state)
    : placement_(std::move(placement)),
      dtype_(dtype),
      planes_(std::move(planes)),
      scaling_state_(std::move(state)) {
  check_gemms_at_first_use(*layout().format, device());
  flush_state_.watch().watch(planes_.memory());
  note_codes();
}

QuantizedBuffer::~QuantizedBuffer() = default;

// -------------------------------------------------------------------------------------- read

void QuantizedBuffer::note_codes() {
  if (planes_.master().defined()) return;  // writes to codes are writes to the tensor then
  const c10::VariableVersion& counter = counters().of_codes();
  codes_version_ = counter.enabled() ? counter.current_version() : 0;  // not in inference mode
}

void QuantizedBuffer::notice_written_codes() {
  const bool may_be_other = flush_state_.watch().has_moved();  // inline: each gather asks
  if (may_be_other && flush_state_.notice_other_memory()) planes_.set_given_grid({});
  const uint32_t noted = codes_version_;
  note_codes();
  if (codes_version_ == noted) return;
  planes_.set_given_grid({});
  flush_state_.replace_codes();
}

int64_t QuantizedBuffer::generation() {
  notice_written_codes();
  return flush_state_.generation();
}

const ReadOnlyTensor& QuantizedBuffer::snapshot_grid() {
  notice_written_codes();
  // A replay changes the grid, or a graph reads one that a later flush will have changed.
  return planes_.give_grid(flush_state_.may_be_replayed() || is_capturing(device()));
}

void QuantizedBuffer::check_is_allocated() const { check_codes_are_allocated(planes_, layout()); }

ReadOnlyTensor QuantizedBuffer::value() {
  materialize();
  arrivals_.settle(*this);
  if (planes_.master().defined()) {
    check_master_is_allocated(planes_, layout(), dtype_);
    return planes_.master();
  }
  if (planes_.pending().defined()) return planes_.pending();
  return dequantized_rows(*this, dtype_);
}

// ------------------------------------------------------------------------------------- write

at::Tensor QuantizedBuffer::write_plane() {
  materialize();
  materialize_image_copies();
  if (planes_.master().defined()) {
    check_master_is_allocated(planes_, layout(), dtype_);
    return planes_.write_master();
  }
  if (!planes_.pending().defined()) planes_.set_pending(dequantized_rows(*this, dtype_));
  return planes_.write_pending();
}

WritableCodes QuantizedBuffer::write_codes() {
  materialize();
  check_is_allocated();
  return {planes_.write_image().mutable_data_ptr<uint8_t>(),
          planes_.own_grid(layout()).mutable_data()};
}

void QuantizedBuffer::mark_empty_write(const c10::TensorImpl& tensor) {
  materialize();  // later, it would take over what the original knows of writes
  flush_state_.mark_remote_write();
  flush_state_.may_differ().in_codes = true;
  if (planes_.master().defined() && !placement_.is_alone()) flush_state_.invalidate_codes();
  flush_state_.watch().expect_version_bump(tensor);
}

void QuantizedBuffer::requantized(ReadOnlyTensor given, const FlushEvent& event, Pending keep) {
  flush_state_.requantize(event);
  planes_.set_given_grid(std::move(given));
  if (keep == Pending::kKeep) return;
  // The flush may run on another stream than the one `pending` was allocated on (FSDP2's copy-in
  // stream), so the allocator has to be told before it is let go.
  record_on_current_stream(planes_.write_pending());
  drop_pending();
}

bool QuantizedBuffer::copy_rows_from(QuantizedBuffer& from, std::span<const RowCopy> copies,
                                     bool non_blocking) {
  from.materialize();
  // Codes that this rank alone has made of a pending write are not the value yet.
  if (!from.flush_state_.codes_current() || from.planes_.pending().defined()) return false;
  // The same codes show another value in another dtype.
  if (dtype_ != from.dtype_ || (keeps_master() && !from.keeps_master())) return false;

  const int64_t live_rows = layout().live_rows();
  const int64_t generation = from.generation();
  const bool is_same_generation = this->generation() == generation;
  int64_t rows = 0;
  for (const RowCopy& copy : copies) {
    if (copy.to.first == rows) rows += copy.to.count;
  }
  const bool is_whole = rows >= live_rows;
  // Beside codes that this rank alone made, a pending write is the value of the other rows.
  if (!is_whole &&
      (!is_same_generation || !flush_state_.codes_current() || planes_.pending().defined())) {
    return false;
  }

  from.check_is_allocated();
  check_is_allocated();
  materialize();
  materialize_image_copies();
  from.flush_state_.flushed().wait();
  for (const auto& [to_rows, from_rows] : copies) {
    if (to_rows.count == 0) continue;
    copy_rows(planes_.write_image(), to_rows, from.planes_.image(), from_rows, non_blocking);
    if (keeps_master()) {
      copy_rows(planes_.write_master(), to_rows, from.value(), from_rows, non_blocking);
    }
  }
  if (!is_whole) {
    flush_state_.replace_rows(from.flush_state_, /*same_amax=*/!keeps_master());
    return true;
  }
  if (!is_same_generation) {
    Grid& grid = planes_.own_grid(layout());
    if (grid.defined()) grid.write().copy_(from.planes_.grid().read().operand(), non_blocking);
    scaling_state_.copy_from(from.scaling_state_);
  }
  drop_pending();
  copy_flush_state(*this, from);
  return true;
}

void QuantizedBuffer::fill_from(QuantizedBuffer& from) {
  PlainGuard guard;
  const Layout& other = from.layout();
  TORCH_CHECK(
      layout().format == other.format && layout().images == other.images &&
          layout().rows == other.rows && layout().cols == other.cols &&
          layout().grid_numel() == other.grid_numel() && dtype_ == from.dtype_ &&
          device() == from.device() && keeps_master() == from.keeps_master(),
      "qshard::SavedTensor.read_into: the tensor was not made of the description that it is "
      "to be filled by; give it what read_later() of the same object made");
  materialize();
  check_is_allocated();
  placement_ = from.placement_;
  planes_.write_image().copy_(from.planes_.image().operand());
  Grid& grid = planes_.own_grid(layout());
  if (grid.defined()) grid.write().copy_(from.planes_.grid().read().operand());
  if (keeps_master()) planes_.write_master().copy_(from.planes_.master().operand());
  planes_.set_pending(from.planes_.write_pending());
  scaling_state_.copy_from(from.scaling_state_);
  copy_flush_state(*this, from);
}

// ------------------------------------------------------------------------------------- kinds

QuantizedBuffer::Gather QuantizedBuffer::end_gather() {
  TORCH_CHECK(gather_, "qshard: fsdp_post_all_gather without fsdp_pre_all_gather before it");
  return *std::exchange(gather_, std::nullopt);
}

void QuantizedBuffer::materialize_image_copies() {
  if (image_copies_) image_copies_->materialize(*this);
}

void QuantizedBuffer::release_resources() {
  try {
    materialize_image_copies();
  } catch (const std::exception&) {
    // Out of memory, say. Such a copy names what it lacks when it is used.
  }
  planes_.release();
  scaling_state_ = {};
  gather_.reset();
  flush_state_.release();
  image_copies_.reset();
}

}  // namespace qshard
