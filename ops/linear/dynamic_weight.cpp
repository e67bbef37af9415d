#include "ops/linear/dynamic_weight.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/checks/first_use.h"
#include "kernels/format/checked_sizes.h"
#include "kernels/format/whole_layout.h"
#include "kernels/scaling/scaling_state.h"
#include "ops/calls/ops.h"

namespace qshard {
namespace {

using at::Tensor;

/// What a plain weight is scaled by: delayed scaling's state, amaxes that the caller knows, or the
/// amaxes of its values.
struct UseScaling {
  ScalingState delayed;
  const float* amax = nullptr;  // (grid_rows * grid_cols,), in a tensor of `state`; null: of values

  UseScaling(const Layout& layout, at::TensorList state, at::Device device, const char* op) {
    const Format& format = *layout.format;
    const bool is_delayed = format.amax_history.length > 0;
    const bool fits = is_delayed
                          ? state.size() == 2
                          : state.empty() || (state.size() == 1 && format.scale.is_in_grid());
    TORCH_CHECK_VALUE(fits, fmt::format("{}: {} needs {}, got {} state tensors", op, format.name,
                                        is_delayed                  ? "2 state tensors"
                                        : format.scale.is_in_grid() ? "none, or known amaxes"
                                                                    : "no state tensors",
                                        state.size()));
    if (state.empty()) return;
    const Tensor& scaled_by = state.back();
    const int64_t first = is_delayed ? kInUse : 0;
    TORCH_CHECK_VALUE(
        scaled_by.scalar_type() == at::kFloat && scaled_by.is_contiguous() &&
            scaled_by.numel() >= first + layout.grid_numel() && scaled_by.device() == device,
        fmt::format("{}: a {} weight of shape ({}, {}) is scaled by {} numbers, float32 on its "
                    "device; got {} of shape {}",
                    op, format.name, layout.rows, layout.cols, layout.grid_numel(),
                    c10::toString(scaled_by.scalar_type()), scaled_by.sizes().vec()));
    if (is_delayed) {  // what rounds stochastically has a key, too, which no use reads
      delayed.amax_history = state[0];
      delayed.scaling_amax = state[1];
    }
    amax = scaled_by.const_data_ptr<float>() + first;
  }
};

/// The layout of a plain weight that is quantized for one use.
Layout checked_layout(const Tensor& weight, const Format& format, WeightUse use, const char* op) {
  TORCH_CHECK_TYPE(is_value_dtype(weight.scalar_type()),
                   fmt::format("{}: a weight that is quantized at each use must be float32, "
                               "bfloat16 or float16, got {}",
                               op, c10::toString(weight.scalar_type())));
  TORCH_CHECK_VALUE(weight.dim() == 2,
                    fmt::format("{}: a weight must have 2 dimensions, got shape {}; in a wrapper "
                                "that flattens parameters, run forward through the wrapper",
                                op, weight.sizes().vec()));
  if (use == WeightUse::kWgradOnly) {  // also of weights that are quantized already
    return checked_sizes(op, whole_layout(format, weight.size(0), weight.size(1)));
  }
  TORCH_CHECK_VALUE(!format.stochastic_rounding,
                    fmt::format("{}: {} rounds what optimizer steps make, and a weight that stays "
                                "plain is not rounded; use nearest rounding",
                                op, format.name));
  const Layout layout = checked_sizes(op, whole_layout(format, weight.size(0), weight.size(1)));
  TORCH_CHECK_VALUE(
      layout.fits(),
      fmt::format("{}: {} needs a multiple of {} rows, got a weight of shape {}", op, format.name,
                  format.columnwise ? format.columnwise->scale.block_rows : 1,
                  weight.sizes().vec()));
  return layout;
}

void write_codes(const Tensor& weight, const Layout& layout, const UseScaling& scaling,
                 const Tensor& image, const Tensor& grid) {
  if (layout.rows == 0 || layout.cols == 0) return;
  const Tensor values = weight.contiguous();
  QuantizeTask task;
  task.layout = layout;
  task.value_dtype = value_dtype(values.scalar_type());
  task.values = values.const_data_ptr();
  task.image = image.mutable_data_ptr<uint8_t>();
  task.grid = grid.defined() ? grid.mutable_data_ptr<float>() : nullptr;
  const Stream stream = current_stream(values.device());
  if (scaling.amax) {
    task.amax = const_cast<float*>(scaling.amax);  // quantize() only reads it
    return quantize({&task, 1}, stream);
  }
  const auto amax = at::empty({amax_numel(layout, {})}, values.options().dtype(at::kFloat));
  task.amax = amax.mutable_data_ptr<float>();
  quantize_at_once({&task, 1}, stream);
}

}  // namespace

LinearWeight quantize_for_use(const Tensor& weight, const Format& format, at::TensorList state,
                              WeightUse use, const char* op) {
  RowImage rows;
  rows.layout = checked_layout(weight, format, use, op);
  check_gemms_at_first_use(format, weight.device());
  const UseScaling scaling(rows.layout, state, weight.device(), op);
  // dgrad reads the columnwise image; both are written where one is.
  if (format.columnwise && use == WeightUse::kForward) {
    rows.layout = rows.layout.with_images(Images::kRowwise);
  }
  const Layout& layout = rows.layout;
  const auto bytes = weight.options().dtype(at::kByte);
  if (use == WeightUse::kWgradOnly) {
    rows.image = at::empty({0}, bytes);
  } else {
    const Tensor image = at::empty({layout.rows, layout.row_bytes()}, bytes);
    Tensor grid;
    if (format.has_grid()) {
      grid = at::empty({layout.grid_rows(), layout.grid_cols()}, bytes.dtype(at::kFloat));
    }
    write_codes(weight, layout, scaling, image, grid);
    rows.image = image;
    rows.grid = grid;
  }
  LinearWeight used{matrix_of(std::move(rows), weight.size(0))};
  used.amax_history = scaling.delayed.amax_history;
  used.scaling_amax = scaling.delayed.scaling_amax;
  return used;
}

Tensor quantize_for_uses(const Tensor& weight, c10::string_view format,
                         const std::vector<Tensor>& state) {
  PlainGuard guard;
  const char* const op = "qshard::_quantize_for_uses";
  const Layout layout = checked_layout(weight, checked_format(format, op), WeightUse::kDgrad, op);
  const UseScaling scaling(layout, state, weight.device(), op);
  c10::OptionalDeviceGuard device_guard(weight.device());
  const auto dtype = weight.scalar_type();
  auto planes =
      Planes::allocate(layout, dtype, /*keeps_master=*/false, weight.device(), Fill::kZeros);
  planes.fill_unit_scales();
  write_codes(weight, layout, scaling, planes.write_image(), planes.own_grid(layout).write());
  auto buffer = c10::make_intrusive<QuantizedBuffer>(Placement(layout), dtype, std::move(planes),
                                                     scaling.delayed);
  return make_tensor(std::move(buffer), weight.sizes());
}

}  // namespace qshard
