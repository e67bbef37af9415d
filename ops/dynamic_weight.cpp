#include "ops/dynamic_weight.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "dispatch/kernel_bridge.h"
#include "dispatch/quantized_tensor_impl.h"
#include "kernels/scaling_state.h"
#include "kernels/whole_layout.h"

namespace qshard {
namespace {

using at::Tensor;

const Format& format_named(c10::string_view name) {
  return find_format({name.data(), name.size()});
}

/// The layout of a weight that is cut into ranges.
Layout ranged_layout(c10::string_view format, int64_t rows, int64_t cols) {
  const Layout layout = whole_layout(format_named(format), rows, cols);
  TORCH_CHECK_VALUE(
      layout.format->scales_in_grid() && layout.format->code_bits == 8 && rows > 0 && cols > 0,
      fmt::format("qshard: ranges of a {} weight of shape ({}, {}) cannot be quantized: its scales "
                  "lie in the rows, or it is empty",
                  layout.format->name, rows, cols));
  return layout;
}

void check_range(const Layout& layout, int64_t start, int64_t numel) {
  TORCH_CHECK_VALUE(start >= 0 && start + numel <= layout.rows * layout.cols,
                    fmt::format("qshard: elements [{}, {}) do not lie within a weight of shape "
                                "({}, {})",
                                start, start + numel, layout.rows, layout.cols));
}

void check_values(const Tensor& values) {
  TORCH_CHECK_TYPE(
      !has_key(values) && values.is_contiguous() && is_value_dtype(values.scalar_type()),
      fmt::format("qshard: a range must be plain, contiguous float32, bfloat16 or "
                  "float16, got {}",
                  c10::toString(values.scalar_type())));
}

void check_scales(const Tensor& scales, const Layout& layout, const Tensor& values) {
  TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat && scales.is_contiguous() &&
                        scales.numel() == layout.grid_numel() && scales.device() == values.device(),
                    fmt::format("qshard: a {} weight of shape ({}, {}) has {} scales, float32 on "
                                "the device of its values; got {} of shape {}",
                                layout.format->name, layout.rows, layout.cols, layout.grid_numel(),
                                c10::toString(scales.scalar_type()), scales.sizes().vec()));
}

/// Rows of a range: where it begins or ends within a row, that one is taken by itself.
struct RowsOfRange {
  int64_t first_row;  // of the weight
  int64_t rows;
  int64_t begin;   // of its elements in the range
  int64_t numel;   // less than rows * cols: a part of one row
  int64_t column;  // where that part begins
};

std::vector<RowsOfRange> rows_of_range(int64_t start, int64_t numel, int64_t cols) {
  std::vector<RowsOfRange> parts;
  int64_t done = 0;
  while (done < numel) {
    const int64_t at = start + done;
    const int64_t column = at % cols;
    const int64_t left = numel - done;
    const bool is_cut = column != 0 || left < cols;
    const int64_t count = is_cut ? std::min(cols - column, left) : left / cols * cols;
    parts.push_back({at / cols, is_cut ? 1 : count / cols, done, count, column});
    done += count;
  }
  return parts;
}

/// A part's values as whole rows: themselves, or zeros around them.
Tensor whole_rows(const Tensor& range, const RowsOfRange& part, int64_t cols) {
  const Tensor values = range.narrow(0, part.begin, part.numel);
  if (part.numel == part.rows * cols) return values;
  auto row = at::zeros({cols}, values.options());
  row.narrow(0, part.column, part.numel).copy_(values);
  return row;
}

Layout layout_of(const Layout& whole, const RowsOfRange& part) {
  Layout layout = whole;
  layout.rows = part.rows;
  layout.row_offset = part.first_row;
  return layout;
}

Tensor new_image(const Layout& layout, const Tensor& values) {
  return at::empty({layout.rows, layout.row_bytes()}, values.options().dtype(at::kByte));
}

/// The codes of a part in its image.
Tensor codes_of(const Tensor& image, const RowsOfRange& part, int64_t cols) {
  return part.numel == part.rows * cols ? image.narrow(1, 0, cols)
                                        : image.narrow(1, part.column, part.numel);
}

/// The layout of a plain weight that is quantized for one use.
Layout checked_layout(const Tensor& weight, const Format& format, at::TensorList state,
                      const char* op) {
  TORCH_CHECK_TYPE(is_value_dtype(weight.scalar_type()),
                   fmt::format("{}: a weight that is quantized at each use must be float32, "
                               "bfloat16 or float16, got {}",
                               op, c10::toString(weight.scalar_type())));
  TORCH_CHECK_VALUE(weight.dim() == 2,
                    fmt::format("{}: a weight must have 2 dimensions, got shape {}; in a wrapper "
                                "that flattens parameters, run forward through the wrapper",
                                op, weight.sizes().vec()));
  TORCH_CHECK_VALUE(!format.stochastic_rounding,
                    fmt::format("{}: {} rounds what optimizer steps make, and a weight that stays "
                                "plain is not rounded; use nearest rounding",
                                op, format.name));
  const bool is_delayed = format.amax_history.length > 0;
  TORCH_CHECK_VALUE(state.size() == (is_delayed ? 2u : 0u),
                    fmt::format("{}: {} needs {} state tensors, got {}", op, format.name,
                                is_delayed ? 2 : 0, state.size()));
  const Layout layout = whole_layout(format, weight.size(0), weight.size(1));
  TORCH_CHECK_VALUE(
      layout.fits(),
      fmt::format("{}: {} needs a multiple of {} rows, got a weight of shape {}", op, format.name,
                  format.columnwise ? format.columnwise->block_rows : 1, weight.sizes().vec()));
  return layout;
}

/// Writes image and grid. Delayed scaling scales by what its state says, other formats by the
/// amaxes of the values.
void write_codes(const Tensor& weight, const Layout& layout, at::TensorList state,
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
  if (!state.empty()) {
    check_scales(state[1].flatten().narrow(0, kInUse, 1), layout, values);
    task.amax = state[1].mutable_data_ptr<float>() + kInUse;  // read only
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
  rows.layout = checked_layout(weight, format, state, op);
  // dgrad reads the columnwise image; both are written where one is.
  if (format.columnwise && use == WeightUse::kForward) rows.layout.images = Images::kRowwise;
  const Layout& layout = rows.layout;
  rows.image = new_image(layout, weight);
  if (format.has_grid()) {
    rows.grid =
        at::empty({layout.grid_rows(), layout.grid_cols()}, weight.options().dtype(at::kFloat));
  }
  if (use != WeightUse::kWgradOnly) write_codes(weight, layout, state, rows.image, rows.grid);
  LinearWeight used{matrix_of(std::move(rows), weight.size(0))};
  if (!state.empty()) {
    used.amax_history = state[0];
    used.scaling_amax = state[1];
  }
  return used;
}

Tensor quantize_for_uses(const Tensor& weight, c10::string_view format,
                         const std::vector<Tensor>& state) {
  PlainGuard guard;
  const Layout layout =
      checked_layout(weight, format_named(format), state, "qshard::_quantize_for_uses");
  c10::OptionalDeviceGuard device_guard(weight.device());
  const auto dtype = weight.scalar_type();
  const auto planes =
      QuantizedBuffer::allocate(layout, dtype, /*keeps_master=*/false, weight.device());
  write_codes(weight, layout, state, planes->image(), planes->grid());
  auto buffer = QuantizedBuffer::over_planes(Placement(layout, /*is_shard=*/false), dtype, {},
                                             planes->code_bytes(), {},
                                             ScalingState::of(layout, state), false);
  return make_tensor(std::move(buffer), weight.sizes());
}

Tensor amax_of_range(const Tensor& values, c10::string_view format, int64_t rows, int64_t cols,
                     int64_t start) {
  PlainGuard guard;
  const Layout whole = ranged_layout(format, rows, cols);
  check_values(values);
  check_range(whole, start, values.numel());
  c10::OptionalDeviceGuard device_guard(values.device());
  const Tensor range = values.view(-1);
  const auto parts = rows_of_range(start, values.numel(), cols);
  const auto floats = values.options().dtype(at::kFloat);
  const auto amaxes = at::zeros(
      {std::max<int64_t>(1, static_cast<int64_t>(parts.size())), whole.grid_numel()}, floats);
  std::vector<QuantizeTask> tasks;
  std::vector<Tensor> kept;
  for (const RowsOfRange& part : parts) {
    kept.push_back(whole_rows(range, part, cols));
    QuantizeTask task;
    task.layout = layout_of(whole, part);
    task.value_dtype = value_dtype(values.scalar_type());
    task.values = kept.back().const_data_ptr();
    task.amax =
        amaxes.mutable_data_ptr<float>() + static_cast<int64_t>(tasks.size()) * whole.grid_numel();
    tasks.push_back(task);
  }
  compute_amax(tasks, current_stream(values.device()));
  // By their bits: NaN is the largest.
  return parts.size() == 1 ? amaxes[0] : amaxes.view(at::kInt).amax(0).view(at::kFloat);
}

Tensor scale_inv_of(const Tensor& amax, c10::string_view format, int64_t rows, int64_t cols) {
  PlainGuard guard;
  Layout layout = ranged_layout(format, rows, cols);
  check_scales(amax, layout, amax);
  c10::OptionalDeviceGuard device_guard(amax.device());
  const auto grid = at::empty_like(amax);
  layout.rows = 0;  // no code is written
  QuantizeTask task;
  task.layout = layout;
  task.amax = amax.mutable_data_ptr<float>();
  task.grid = grid.mutable_data_ptr<float>();
  quantize({&task, 1}, current_stream(amax.device()));
  return grid;
}

void quantize_range(const Tensor& values, c10::string_view format, int64_t rows, int64_t cols,
                    int64_t start, const Tensor& amax, const Tensor& codes) {
  PlainGuard guard;
  const Layout whole = ranged_layout(format, rows, cols);
  check_values(values);
  check_range(whole, start, values.numel());
  check_scales(amax, whole, values);
  TORCH_CHECK_VALUE(
      codes.scalar_type() == at::kByte && codes.is_contiguous() && codes.numel() == values.numel(),
      fmt::format("qshard::_quantize_range: codes must be contiguous uint8 of {} "
                  "bytes, got {} of shape {}",
                  values.numel(), c10::toString(codes.scalar_type()), codes.sizes().vec()));
  c10::OptionalDeviceGuard device_guard(values.device());
  const Tensor range = values.view(-1);
  const Tensor out = codes.view(-1);
  const auto parts = rows_of_range(start, values.numel(), cols);
  const auto grids =
      at::empty({static_cast<int64_t>(parts.size()), whole.grid_numel()}, amax.options());
  std::vector<QuantizeTask> tasks;
  std::vector<Tensor> kept, images;
  for (const RowsOfRange& part : parts) {
    kept.push_back(whole_rows(range, part, cols));
    QuantizeTask task;
    task.layout = layout_of(whole, part);
    images.push_back(new_image(task.layout, values));
    task.value_dtype = value_dtype(values.scalar_type());
    task.values = kept.back().const_data_ptr();
    task.image = images.back().mutable_data_ptr<uint8_t>();
    task.amax = amax.mutable_data_ptr<float>();  // read only
    task.grid =
        grids.mutable_data_ptr<float>() + static_cast<int64_t>(tasks.size()) * whole.grid_numel();
    tasks.push_back(task);
  }
  quantize(tasks, current_stream(values.device()));
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto part = codes_of(images[i], parts[i], cols);
    out.narrow(0, parts[i].begin, parts[i].numel).view(part.sizes()).copy_(part);
  }
}

void dequantize_range(const Tensor& codes, c10::string_view format, int64_t rows, int64_t cols,
                      int64_t start, const Tensor& scale_inv, const Tensor& values) {
  PlainGuard guard;
  const Layout whole = ranged_layout(format, rows, cols);
  check_values(values);
  check_range(whole, start, values.numel());
  check_scales(scale_inv, whole, values);
  TORCH_CHECK_VALUE(
      codes.scalar_type() == at::kByte && codes.is_contiguous() &&
          codes.numel() == values.numel() && codes.device() == values.device(),
      fmt::format("qshard::_dequantize_range: codes must be contiguous uint8 of {} "
                  "bytes, got {} of shape {}",
                  values.numel(), c10::toString(codes.scalar_type()), codes.sizes().vec()));
  c10::OptionalDeviceGuard device_guard(values.device());
  const Tensor range = values.view(-1);
  const Tensor in = codes.view(-1);
  const auto parts = rows_of_range(start, values.numel(), cols);
  std::vector<DequantizeTask> tasks;
  std::vector<Tensor> images, shown;
  for (const RowsOfRange& part : parts) {
    const bool is_cut = part.numel != part.rows * cols;
    DequantizeTask task;
    task.layout = layout_of(whole, part);
    const auto source = in.narrow(0, part.begin, part.numel);
    // Rows of 16 bytes times n, at an aligned address, are an image as they arrive.
    const bool is_image = !is_cut && task.layout.row_bytes() == cols &&
                          reinterpret_cast<uintptr_t>(source.const_data_ptr()) % 16 == 0;
    images.push_back(is_image ? source : new_image(task.layout, values).zero_());
    if (!is_image) {
      auto target = codes_of(images.back(), part, cols);
      target.copy_(source.view(target.sizes()));
    }
    const auto target = range.narrow(0, part.begin, part.numel);
    shown.push_back(is_cut ? at::empty({cols}, values.options()) : target);
    task.image = static_cast<const uint8_t*>(images.back().const_data_ptr());
    task.grid = scale_inv.const_data_ptr<float>();
    task.rows = part.rows;
    task.value_dtype = value_dtype(values.scalar_type());
    task.values = shown.back().mutable_data_ptr();
    tasks.push_back(task);
  }
  dequantize(tasks, current_stream(values.device()));
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& part = parts[i];
    if (part.numel == part.rows * cols) continue;
    range.narrow(0, part.begin, part.numel).copy_(shown[i].narrow(0, part.column, part.numel));
  }
}

void update_delayed_op(const Tensor& amax, const std::vector<std::string>& formats,
                       at::TensorList amax_history, at::TensorList scaling_amax,
                       at::ScalarType value_type, bool is_step,
                       const std::optional<Tensor>& found_inf) {
  PlainGuard guard;
  const auto count = static_cast<int64_t>(formats.size());
  constexpr int64_t kWords = 1 + kActivationRows;
  TORCH_CHECK_VALUE(amax_history.size() == formats.size() &&
                        scaling_amax.size() == formats.size() && amax.scalar_type() == at::kFloat &&
                        amax.is_contiguous() && amax.numel() == count * kWords,
                    "qshard::_update_delayed: needs two state tensors and three amaxes per weight");
  if (count == 0) return;
  c10::OptionalDeviceGuard device_guard(amax.device());
  // Kernels that write state have it and the amaxes side by side.
  auto words = amax.view({count, kWords}).t().contiguous();
  auto* const first = words.mutable_data_ptr<float>();
  const auto activations = amax.view({count, kWords}).narrow(1, 1, kActivationRows).contiguous();
  std::vector<StateTask> tasks;
  for (int64_t i = 0; i < count; ++i) {
    StateTask task;
    task.layout = whole_layout(format_named(formats[i]), 1, 1);
    const int64_t length = task.layout.format->amax_history.length;
    TORCH_CHECK_VALUE(
        length > 0 && amax_history[i].numel() == kWords * length &&
            scaling_amax[i].numel() == kWords * kScalingAmaxes && amax_history[i].is_contiguous() &&
            scaling_amax[i].is_contiguous() && amax_history[i].device() == amax.device() &&
            scaling_amax[i].device() == amax.device(),
        fmt::format("qshard::_update_delayed: this is not the state of a {} weight", formats[i]));
    task.value_dtype = value_dtype(value_type);
    task.amax = first + i;
    task.words = activations.mutable_data_ptr<float>() + i * kActivationRows;
    task.amax_history = amax_history[i].mutable_data_ptr<float>();
    task.scaling_amax = scaling_amax[i].mutable_data_ptr<float>();
    tasks.push_back(task);
  }
  Tensor skipped;
  if (found_inf) skipped = found_inf->to(amax.device(), at::kFloat);
  apply_state(tasks, is_step ? FlushKind::kStep : FlushKind::kOthers,
              skipped.defined() ? skipped.const_data_ptr<float>() : nullptr,
              current_stream(amax.device()));
  amax.view({count, kWords}).select(1, 0).copy_(words[0]);
}

}  // namespace qshard
