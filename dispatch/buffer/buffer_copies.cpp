#include "dispatch/buffer/buffer_copies.h"

#include <cstring>

#include "dispatch/buffer/read_codes.h"
#include "dispatch/parts/kernel_bridge.h"

namespace qshard {
namespace {

void copy_storage(const c10::Storage& to, const c10::Storage& from) {
  copy_on_device(to.mutable_data(), from.data(), static_cast<int64_t>(from.nbytes()), to.device());
}

}  // namespace

void copy_rows(const at::Tensor& to, RowWindow to_rows, const ReadOnlyTensor& from,
               RowWindow from_rows, bool non_blocking) {
  if (to.is_cpu() && from.device().is_cpu()) {
    const size_t row = to.size(1) * to.element_size();
    std::memmove(static_cast<uint8_t*>(to.mutable_data_ptr()) + to_rows.first * row,
                 static_cast<const uint8_t*>(from.const_data_ptr()) + from_rows.first * row,
                 to_rows.count * row);
    return;
  }
  to.narrow(0, to_rows.first, to_rows.count)
      .copy_(from.narrow(0, from_rows.first, from_rows.count).operand(), non_blocking);
}

void copy_flush_state(QuantizedBuffer& to, const QuantizedBuffer& from) {
  // A master in another dtype has other amaxes, and so have fewer rows.
  const bool same_values = to.dtype() == from.dtype() &&
                           to.layout().row_offset == from.layout().row_offset &&
                           to.layout().rows_of_each == from.layout().rows_of_each &&
                           to.layout().live_rows() == from.layout().live_rows();
  to.flush_state().copy_of(from.flush_state(), same_values || !to.keeps_master(), to.device());
}

BufferPtr copy_buffer(QuantizedBuffer& buffer, const CopyTo& to) {
  PlainGuard guard;
  buffer.check_is_allocated();
  buffer.materialize();
  buffer.flush_state().flushed().wait();
  const Layout& layout = buffer.layout();
  const Planes& from = buffer.planes();
  const at::ScalarType dtype = buffer.dtype();
  const bool keeps_master = buffer.keeps_master();
  Placement placement(layout);
  placement.adopt_groups_of(buffer.placement());
  if (!to.keeps_adoption) placement.detach_from_groups();
  auto planes =
      Planes::allocate(layout, to.dtype, keeps_master, to.device, Fill::kNothing, to.pinned);
  const auto of_planes = [&] {
    return c10::make_intrusive<QuantizedBuffer>(std::move(placement), to.dtype, std::move(planes),
                                                buffer.scaling_state().copy_to(to.device));
  };
  if (to.device.is_meta() != buffer.device().is_meta()) {
    TORCH_CHECK(to.device.is_meta(),
                "qshard: cannot copy a quantized tensor out of the meta device; there "
                "is no data. Use to_empty() and initialise it");
    auto copy = of_planes();
    const FlushState& state = buffer.flush_state();
    copy->flush_state().restore(state.is_written_here(), /*codes_current=*/true,
                                state.may_differ());
    return copy;
  }
  const bool is_bytewise =
      !to.pinned && !to.device.is_meta() && to.dtype == dtype && to.device == buffer.device();
  if (is_bytewise && from.has_code_storage(layout)) {
    copy_storage(planes.code_storage(), from.code_storage());
  } else {
    planes.write_image().copy_(from.image().operand(), to.non_blocking);
    if (from.grid().defined()) {
      planes.own_grid(layout).write().copy_(from.grid().read().operand(), to.non_blocking);
    }
  }
  if (keeps_master) {
    check_master_is_allocated(from, layout, dtype);
    if (is_bytewise) {
      copy_storage(planes.storage(), from.storage());
    } else {
      planes.write_master().copy_(from.master().operand(), to.non_blocking);
    }
  }
  const bool is_rounded = !keeps_master && to.dtype != dtype && dtype != at::kFloat;
  if (from.pending().defined() || is_rounded) {
    planes.set_pending(buffer.value().operand().to(to.device, to.dtype, to.non_blocking,
                                                   /*copy=*/true));
  }
  auto copy = of_planes();
  copy_flush_state(*copy, buffer);
  // The value is what the codes show, rounded to a narrow dtype, and in another one no codes show
  // just that.
  if (is_rounded) copy->written();
  return copy;
}

BufferPtr concatenate(const std::vector<std::pair<BufferPtr, RowWindow>>& pieces) {
  PlainGuard guard;
  const auto& [first, first_rows] = pieces.front();
  int64_t count = 0;
  for (const auto& [piece, rows] : pieces) count += rows.count;
  const int64_t place = first->layout().row_offset + first_rows.first;
  const Layout layout = first->layout().holding(count).placed(place);
  const at::Device device = first->device();
  auto planes =
      Planes::allocate(layout, first->dtype(), first->keeps_master(), device, Fill::kNothing);
  int64_t next = 0;
  for (const auto& [piece, rows] : pieces) {
    piece->check_is_allocated();
    piece->materialize();
    copy_rows(planes.write_image(), {next, rows.count}, piece->planes().image(), rows, false);
    if (first->keeps_master()) {
      copy_rows(planes.write_master(), {next, rows.count}, piece->planes().master(), rows, false);
    }
    next += rows.count;
  }
  if (const Grid& grid = first->planes().grid(); grid.defined()) {
    planes.own_grid(layout).write().copy_(grid.read().operand());
  }
  Placement placement(layout);
  placement.share_scale(first->placement().scale_group());
  auto whole =
      c10::make_intrusive<QuantizedBuffer>(std::move(placement), first->dtype(), std::move(planes),
                                           first->scaling_state().copy_to(device));
  copy_flush_state(*whole, *first);
  return whole;
}

BufferPtr copy_matrices(QuantizedBuffer& buffer, RowWindow rows, int64_t run,
                        const at::Tensor& index) {
  PlainGuard guard;
  buffer.check_is_allocated();
  buffer.materialize();
  buffer.flush_state().flushed().wait();
  const Layout& layout = buffer.layout();
  const Planes& from = buffer.planes();
  const bool keeps_master = buffer.keeps_master();
  const int64_t picked = index.numel();
  const Layout own = own_tensor(layout.holding(picked * run), layout.matrix_rows);
  auto planes =
      Planes::allocate(own, buffer.dtype(), keeps_master, buffer.device(), Fill::kNothing);
  // Rows [first, first + rows.count / run * length) of a plane, in runs of `length` rows.
  const auto pick = [&](const at::Tensor& to, const at::Tensor& plane, int64_t first,
                        int64_t length) {
    const int64_t runs = rows.count / run, width = plane.size(1);
    const at::Tensor source = plane.narrow(0, first, runs * length);
    auto target = to.view({picked, length * width});
    at::index_select_out(target, source.view({runs, length * width}), 0, index);
  };
  pick(planes.write_image(), from.image().operand(), rows.first, run);
  if (from.grid().defined()) {
    const int64_t length = own.grid_rows() ? own.grid_rows() / picked : 0;
    pick(planes.own_grid(own).write(), from.grid().read().operand(),
         layout.grid_row(layout.row_offset + rows.first), length);
  }
  if (keeps_master) {
    check_master_is_allocated(from, layout, buffer.dtype());
    pick(planes.write_master(), from.master().operand(), rows.first, run);
  }
  if (from.pending().defined()) {
    const at::Tensor values = from.pending().operand();
    auto pending = at::empty({own.rows, own.cols}, values.options());
    pick(pending, values, rows.first, run);
    planes.set_pending(std::move(pending));
  }
  const int64_t first_matrix = (layout.row_offset + rows.first) / layout.matrix_rows;
  auto copy = c10::make_intrusive<QuantizedBuffer>(
      Placement(own), buffer.dtype(), std::move(planes),
      buffer.scaling_state().copy_of_matrices(layout, first_matrix, run / layout.matrix_rows,
                                              index));
  FlushState& state = copy->flush_state();
  state.copy_of(buffer.flush_state(), /*same_amax=*/false, copy->device());
  state.replace_codes();  // the grid is another one
  // Without a master, what the codes show is the value.
  if (!keeps_master && state.codes_current()) state.mark_scales_synced();
  return copy;
}

}  // namespace qshard
