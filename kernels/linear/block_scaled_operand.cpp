#include "kernels/linear/block_scaled_operand.h"

#include <ATen/ops/empty.h>

#include "kernels/device/current_stream.h"
#include "kernels/format/value_dtype.h"
#include "kernels/format/whole_layout.h"
#include "kernels/quantize/quantize.h"
#include "kernels/transpose/transpose.h"

namespace qshard {
namespace {

at::Tensor empty_image(const Layout& layout, const at::TensorOptions& options) {
  return at::empty({layout.rows, layout.row_bytes()}, options.dtype(at::kByte));
}

}  // namespace

at::Tensor transposed_values(const at::Tensor& x, bool hadamard) {
  const at::Tensor values = x.contiguous();
  const at::Tensor out = at::empty({x.size(1), round_up(x.size(0), 32)}, x.options());
  TransposeTask task;
  task.values = values.const_data_ptr();
  task.rows = x.size(0);
  task.cols = x.size(1);
  task.value_dtype = value_dtype(x.scalar_type());
  task.hadamard = hadamard;
  task.out = out.mutable_data_ptr();
  task.padded_rows = out.size(1);
  transpose_values(task, current_stream(x.device()));
  return out;
}

RowImage quantized_as(const at::Tensor& values, const Layout& layout, const int32_t* rounding,
                      const std::function<void(const at::Tensor&)>& change_amax) {
  const at::Tensor amax = at::empty({layout.grid_numel()}, values.options().dtype(at::kFloat));
  const at::Tensor image = empty_image(layout, values.options());
  const at::Tensor grid = at::empty({layout.grid_numel()}, amax.options());
  QuantizeTask task;
  task.layout = layout;
  task.value_dtype = value_dtype(values.scalar_type());
  task.values = values.const_data_ptr();
  task.image = image.mutable_data_ptr<uint8_t>();
  task.amax = amax.mutable_data_ptr<float>();
  task.grid = grid.mutable_data_ptr<float>();
  task.rounding = rounding;
  const Stream stream = current_stream(values.device());
  compute_amax({&task, 1}, stream);
  if (change_amax) change_amax(amax);
  quantize({&task, 1}, stream);
  return {layout, image, grid};
}

RowImage quantized_rows(const at::Tensor& x, const Format& format, const int32_t* rounding) {
  return quantized_as(x.contiguous(), whole_layout(activation_format(format), x.size(0), x.size(1)),
                      rounding);
}

RowImage quantized_columns(const at::Tensor& x, const Format& format, const int32_t* rounding) {
  const at::Tensor values = transposed_values(x, format.activations.hadamard_columns);
  const int64_t k = x.size(1);
  const auto layout = whole_layout(activation_format(format), k, values.size(1), round_up(k, 16));
  return quantized_as(values, layout, rounding);
}

RowImage weight_rows(const QuantizedMatrix& weight) {
  const RowImage& window = weight.row_image();
  const Layout& held = window.layout;
  RowImage out;
  out.layout = whole_layout(*held.format, weight.rows, held.cols).with_images(held.images);
  out.image =
      window.image.view({held.rows, held.row_bytes()}).narrow(0, window.first_row, weight.rows);
  if (held.format->has_grid()) {
    const int64_t offset = held.row_offset;
    out.grid = window.grid.view({-1}).narrow(0, held.grid_row(offset + window.first_row), 1);
  } else {
    out.grid = at::empty({0}, window.image.options().dtype(at::kFloat));
  }
  return out;
}

RowImage weight_columns(const QuantizedMatrix& weight) {
  const RowImage rows = weight_rows(weight);
  const Layout layout = transposed_layout(rows.layout);
  const at::Tensor image = empty_image(layout, rows.image.options());
  const TransposeImageTask task{rows.layout, rows.image.const_data_ptr<uint8_t>(),
                                image.mutable_data_ptr<uint8_t>()};
  transpose_image(task, current_stream(rows.image.device()));
  return {layout, image, rows.grid};
}

}  // namespace qshard
