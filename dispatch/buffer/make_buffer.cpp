#include "dispatch/buffer/make_buffer.h"

#include <utility>

#include "dispatch/buffer/read_codes.h"
#include "dispatch/parts/kernel_bridge.h"

namespace qshard {
namespace {

BufferPtr new_buffer(const Placement& placement, at::ScalarType dtype, Planes planes,
                     ScalingState state) {
  return c10::make_intrusive<QuantizedBuffer>(placement, dtype, std::move(planes),
                                              std::move(state));
}

Planes zeros_with_unit_scales(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                              at::Device device) {
  auto planes = Planes::allocate(layout, dtype, keeps_master, device, Fill::kZeros);
  planes.fill_unit_scales();
  return planes;
}

}  // namespace

BufferPtr make_buffer(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                      at::Device device) {
  PlainGuard guard;
  return new_buffer(Placement(layout), dtype,
                    zeros_with_unit_scales(layout, dtype, keeps_master, device),
                    ScalingState::fresh(layout, device));
}

BufferPtr make_buffer_of_values(const Placement& placement, const at::Tensor& values,
                                bool keeps_master) {
  PlainGuard guard;
  const at::Device device = values.device();
  const auto dtype = values.scalar_type();
  const Layout& layout = placement.layout();
  auto planes = zeros_with_unit_scales(layout, dtype, keeps_master, device);
  if (!device.is_meta()) {
    if (keeps_master) {
      planes.write_master().copy_(values);
    } else {
      planes.set_pending(values.contiguous());
    }
  }
  auto buffer =
      new_buffer(placement, dtype, std::move(planes), ScalingState::fresh(layout, device));
  buffer->written();
  return buffer;
}

BufferPtr make_buffer_of_codes(const Placement& placement, at::ScalarType dtype, bool keeps_master,
                               const at::Tensor& image, const at::Tensor& grid) {
  PlainGuard guard;
  const at::Device device = image.device();
  const Layout& layout = placement.layout();
  auto planes = Planes::allocate(layout, dtype, keeps_master, device, Fill::kNothing);
  if (!device.is_meta()) {
    planes.write_image().copy_(image);
    if (grid.defined()) planes.own_grid(layout).write().copy_(grid);
    if (keeps_master) {
      planes.write_master().copy_(dequantized_rows(planes, layout, {0, layout.rows}, dtype));
    }
  }
  return new_buffer(placement, dtype, std::move(planes), ScalingState::fresh(layout, device));
}

BufferPtr make_buffer_of_rows(QuantizedBuffer& from, const Placement& placement,
                              at::ScalarType dtype, at::Device device, Fill fill) {
  PlainGuard guard;
  const Layout& layout = placement.layout();
  ReadOnlyTensor grid;
  if (from.planes().grid().defined() && !device.is_meta() && !from.device().is_meta()) {
    grid = from.snapshot_grid();
    if (grid.device() != device) grid = grid.operand().to(device);
  }
  auto planes =
      Planes::allocate_with_snapshot(grid, layout, dtype, from.keeps_master(), device, fill);
  if (!grid.defined()) planes.fill_unit_scales();
  auto buffer =
      new_buffer(placement, dtype, std::move(planes), from.scaling_state().copy_to(device));
  // Zero codes are of the template's generation if its scales are theirs; not where rows carry
  // their own scales: these rows have none yet.
  if (grid.defined() && layout.format->scale.is_in_grid()) {
    buffer->flush_state().join(from.generation());
  }
  const FlushState& state = from.flush_state();
  buffer->flush_state().restore(state.is_written_here(), /*codes_current=*/true,
                                state.may_differ());
  return buffer;
}

BufferPtr make_buffer_without_bytes(const QuantizedBuffer& from, at::ScalarType dtype,
                                    at::Device device) {
  PlainGuard guard;
  auto buffer =
      new_buffer(Placement(from.layout()), dtype, Planes::none(dtype, from.keeps_master(), device),
                 from.scaling_state().copy_to(device));
  buffer->placement().adopt_groups_of(from.placement());
  const FlushState& state = from.flush_state();
  buffer->flush_state().restore(state.is_written_here(), /*codes_current=*/true,
                                state.may_differ());
  return buffer;
}

BufferPtr make_buffer_over_storage(const QuantizedBuffer& from, c10::Storage storage) {
  PlainGuard guard;
  const bool keeps_master = from.keeps_master();
  const Layout& layout = from.layout();
  auto planes = keeps_master ? Planes::around_master(std::move(storage), layout, from.dtype())
                             : Planes::over_codes(std::move(storage), layout);
  auto buffer = new_buffer(from.placement(), from.dtype(), std::move(planes), from.scaling_state());
  const FlushState& state = from.flush_state();
  buffer->flush_state().restore(keeps_master || state.is_written_here(),
                                /*codes_current=*/!keeps_master, state.may_differ());
  return buffer;
}

void restore_flush_state(QuantizedBuffer& loaded, bool is_written) {
  const Planes& planes = loaded.planes();
  const bool has_value = planes.master().defined() || planes.pending().defined();
  MayDiffer may_differ;
  may_differ.in_codes = is_written && !has_value && loaded.layout().rows == 0;
  loaded.flush_state().restore(is_written, /*codes_current=*/!(is_written && has_value),
                               may_differ);
}

BufferPtr make_buffer_over_planes(const Placement& placement, at::ScalarType dtype,
                                  const at::Tensor& master, const at::Tensor& codes,
                                  const at::Tensor& pending, ScalingState state, bool is_written) {
  auto planes = Planes::over(master, codes, placement.layout(), dtype);
  planes.set_pending(pending);
  auto buffer = new_buffer(placement, dtype, std::move(planes), std::move(state));
  restore_flush_state(*buffer, is_written);
  return buffer;
}

}  // namespace qshard
