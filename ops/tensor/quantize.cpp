// quantize, dequantize and the accessors of a quantized tensor's planes.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <stdexcept>

#include "dispatch/aten/registration.h"
#include "dispatch/buffer/make_buffer.h"
#include "dispatch/buffer/master_aliases.h"
#include "dispatch/buffer/plane_access.h"
#include "dispatch/buffer/read_codes.h"
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "dispatch/tensor/shard_to_be.h"
#include "kernels/format/checked_sizes.h"
#include "kernels/format/formats.h"
#include "ops/calls/ops.h"

namespace qshard {
namespace {

void check_can_be_quantized(const Tensor& self) {
  TORCH_CHECK_TYPE(
      is_value_dtype(self.scalar_type()),
      fmt::format("qshard::quantize: expected a float32, bfloat16 or float16 tensor, got "
                  "{}",
                  c10::toString(self.scalar_type())));
  TORCH_CHECK_VALUE(
      self.dim() >= 2,
      fmt::format("qshard::quantize: expected at least 2 dimensions (rows x columns), "
                  "got shape {}",
                  self.sizes().vec()));
  TORCH_CHECK_VALUE(self.layout() == at::kStrided,
                    fmt::format("qshard::quantize: expected a strided tensor, got layout {}",
                                c10::str(self.layout())));
  const auto device = self.device();
  TORCH_CHECK_VALUE(
      device.is_cpu() || device.is_cuda() || device.is_meta(),
      fmt::format("qshard::quantize: expected a tensor on cpu or cuda, got {}", device.str()));
}

/// `groups`: of a share of a tensor that other ranks hold parts of.
Tensor quantize_rows(const Tensor& self, const Layout& layout, bool keep_master,
                     const Groups* groups) {
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(self.device());
  const Tensor values = value_or_itself(self);
  Tensor rows = values.reshape({layout.rows, layout.cols});
  // A share waits for its flush with values of its own; a whole tensor is done with them here.
  if (groups && !keep_master && rows.is_alias_of(self)) rows = rows.clone();
  Placement placement(layout);
  if (groups) placement.adopt(*groups);
  auto buffer = make_buffer_of_values(placement, rows, keep_master);
  if (buffer->placement().is_alone()) flush_alone(buffer);
  if (!groups) buffer->flush_state().mark_scales_synced();
  return make_tensor(std::move(buffer), self.sizes());
}

/// What quantize() can make of `self`.
const Format& checked_arguments(const Tensor& self, c10::string_view format_name,
                                bool keep_master) {
  check_key_is_ours("qshard::quantize");
  const Format& format = checked_format(format_name, "qshard::quantize");
  check_can_be_quantized(self);
  TORCH_CHECK_VALUE(!keep_master || !format.stochastic_rounding,
                    fmt::format("qshard::quantize: {} with keep_master=True: a master holds what "
                                "stochastic rounding is for; use one of the two",
                                format.name));
  return format;
}

QuantizedBuffer& quantized_buffer(const Tensor& self, const char* op) {
  TORCH_CHECK_TYPE(has_key(self),
                   fmt::format("{}: expected a quantized tensor, got a plain {} tensor", op,
                               c10::toString(self.scalar_type())));
  return buffer_of(self);
}

/// In-place operators on codes and scales are noticed.
Tensor watched(Tensor plane, const Tensor& self) {
  return PlaneAccess(buffer_of(self)).watched(std::move(plane));
}

/// The grid entries of a window of rows; shaped like its leading dimensions if it holds whole
/// matrices.
Tensor grid_of_rows(const Tensor& self, const RowWindow& rows) {
  QuantizedBuffer& buffer = buffer_of(self);
  const Tensor grid = PlaneAccess(buffer).grid();  // the caller may write what it gets
  const Layout& layout = buffer.layout();
  const int64_t first = logical_row(layout, rows.first);
  const int64_t run = run_from(layout, rows.first, rows.count);
  const int64_t last = std::min(first + run, layout.logical_rows) - 1;
  if (last < first) return grid.narrow(0, 0, 0);
  const int64_t first_row = layout.grid_row(first);
  auto scales = grid.narrow(0, first_row, layout.grid_row(last) + 1 - first_row);
  if (run < rows.count) {
    const int64_t each = layout.rows_of_each;
    TORCH_CHECK_VALUE(rows.first % each == 0 && rows.count % each == 0,
                      fmt::format("qshard::scale_inv: {} shows parts of the {} rows that this rank "
                                  "has of each matrix; take whole ones",
                                  describe(self), each));
    const int64_t of_one = layout.grid_rows() / layout.matrices();
    scales = grid.view({layout.matrices(), of_one, layout.grid_cols()})
                 .narrow(0, first_row / of_one, rows.count / each)
                 .narrow(1, first_row % of_one, scales.size(0));
    return self.dim() == 2 ? scales.flatten(0, 1) : scales;
  }
  if (self.dim() == 2 || rows.count % layout.matrix_rows != 0) return scales;
  c10::DimVector sizes(self.sizes().slice(0, self.dim() - 2));
  sizes.push_back(layout.grid_rows() / layout.matrices());
  sizes.push_back(layout.grid_cols());
  return scales.view(sizes);
}

/// The codes of `self` in the image that begins `image_offset` bytes into each row.
Tensor codes_in_image(const Tensor& self, int64_t image_offset, const char* op) {
  QuantizedBuffer& buffer = buffer_of(self);
  const Layout& layout = buffer.layout();
  PlainGuard guard;
  const auto not_a_window = [&](const char* why) {
    return fmt::format("{}: {} with strides {} is not a window of rows and columns{}", op,
                       describe(self), self.strides().vec(), why);
  };
  // A stride counts elements of the dense virtual buffer: whole rows, or single columns.
  const int64_t per_byte = 8 / layout.format->code_bits;
  const auto to_image = [&](int64_t elements, bool is_offset) {
    if (layout.cols == 0) return int64_t{0};
    const int64_t column = elements % layout.cols;
    TORCH_CHECK_VALUE(is_offset || column == 0 || elements == 1, not_a_window(""));
    TORCH_CHECK_VALUE(!is_offset || column % per_byte == 0, not_a_window(" at whole bytes"));
    return elements / layout.cols * layout.row_bytes() + ceil_div(column, per_byte);
  };
  c10::DimVector sizes(self.sizes()), strides;
  for (const int64_t stride : self.strides()) {
    // Where a dimension has no second element its stride may be any number: as large as the tensor
    // will do.
    strides.push_back(to_image(std::min(stride, layout.rows * layout.cols), false));
  }
  if (per_byte > 1) {
    TORCH_CHECK_VALUE(self.dim() > 0 && (self.stride(-1) == 1 || self.numel() == 0),
                      not_a_window(" at whole bytes"));
    sizes.back() = ceil_div(sizes.back(), per_byte);
    strides.back() = 1;
  }
  const Tensor bytes = PlaneAccess(buffer).image();
  const Tensor image = per_byte > 1 ? bytes : bytes.view(at::kFloat8_e4m3fn);
  if (self.numel() == 0) return image.new_empty(sizes);
  return image.as_strided(sizes, strides, image_offset + to_image(self.storage_offset(), true));
}

/// The buffer of a quantized tensor, flushed and with the columnwise image that `op` reads.
const QuantizedBuffer& columnwise_buffer(const Tensor& self, const char* op) {
  const QuantizedBuffer& buffer = quantized_buffer(self, op);
  TORCH_CHECK_VALUE(buffer.layout().format->columnwise,
                    fmt::format("{}: {} has one row image, for rows and columns: qshard::codes and "
                                "qshard::scale_inv show it",
                                op, describe(self)));
  TORCH_CHECK(
      buffer.layout().has_columnwise(),
      fmt::format("{}: this {} was gathered in forward, without its columnwise image; use a "
                  "recipe with gather=\"both\"",
                  op, describe(self)));
  ensure_codes_current(impl_of(self).buffer(), op);
  return buffer;
}

}  // namespace

const Format& checked_format(c10::string_view name, const char* op) {
  try {
    return find_format(std::string_view(name.data(), name.size()));
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, fmt::format("{}: {}", op, error.what()));
  }
}

Layout layout_of(at::IntArrayRef sizes, const Format& format, std::optional<int64_t> logical_rows,
                 int64_t row_offset, const char* op) {
  const auto leading = sizes.slice(0, sizes.size() - 1);
  const int64_t rows = checked_product(op, "the shape's rows", {leading.data(), leading.size()});
  const int64_t whole = logical_rows.value_or(rows);
  const Layout layout{.format = &format,
                      .rows = rows,
                      .cols = sizes.back(),
                      .logical_rows = whole,
                      .matrix_rows = sizes.size() == 2 ? whole : sizes[sizes.size() - 2],
                      .row_offset = row_offset};
  checked_sizes(op, layout);
  TORCH_CHECK_VALUE(lies_within(row_offset, layout.rows, layout.logical_rows),
                    fmt::format("{}: rows [{}, {}) do not lie within logical_rows={}", op,
                                row_offset, row_offset + layout.rows, layout.logical_rows));
  TORCH_CHECK_VALUE(layout.matrix_rows == 0 || layout.logical_rows % layout.matrix_rows == 0,
                    fmt::format("{}: logical_rows={} is not a whole number of matrices of {} rows",
                                op, layout.logical_rows, layout.matrix_rows));
  TORCH_CHECK_VALUE(
      layout.fits(),
      fmt::format("{}: {} needs matrices of a multiple of {} rows, got {} rows in shape {}; use "
                  "the format mxfp8, whose blocks are 32x32",
                  op, format.name, format.columnwise->scale.block_rows, layout.matrix_rows,
                  sizes.vec()));
  return layout;
}

Layout layout_of(at::IntArrayRef sizes, const Format& format, std::optional<int64_t> logical_rows,
                 int64_t row_offset, int64_t rows_of_each, const char* op) {
  if (rows_of_each == 0) return layout_of(sizes, format, logical_rows, row_offset, op);
  TORCH_CHECK_VALUE(logical_rows,
                    fmt::format("{}: rows_of_each={} needs logical_rows, those of all "
                                "matrices together",
                                op, rows_of_each));
  TORCH_CHECK_VALUE(sizes.size() == 3 && sizes[1] == rows_of_each && sizes[0] > 0 &&
                        *logical_rows % sizes[0] == 0,
                    fmt::format("{}: a tensor of shape {} does not have {} rows of each matrix of "
                                "{} rows",
                                op, sizes, rows_of_each, *logical_rows));
  const int64_t matrix_rows = *logical_rows / sizes[0];
  TORCH_CHECK_VALUE(
      lies_within(row_offset, rows_of_each, matrix_rows),
      fmt::format("{}: rows [{}, {}) of each matrix do not lie within its {} rows, those of "
                  "logical_rows={} in {} matrices",
                  op, row_offset, row_offset + rows_of_each, matrix_rows, *logical_rows, sizes[0]));
  const Layout whole =
      layout_of({sizes[0], matrix_rows, sizes[2]}, format, logical_rows, /*row_offset=*/0, op);
  check_can_cut_matrices(Placement(whole), sizes);
  return holding_of_each(whole, row_offset, rows_of_each);
}

Tensor quantize(const Tensor& self, c10::string_view format_name, bool keep_master,
                std::optional<c10::SymInt> logical_rows, c10::SymInt row_offset) {
  const Format& format = checked_arguments(self, format_name, keep_master);
  const bool is_shard = logical_rows.has_value();
  const Layout layout = layout_of(
      self.sizes(), format, is_shard ? std::optional(logical_rows->expect_int()) : std::nullopt,
      row_offset.expect_int(), "qshard::quantize");
  const Groups none_known;
  return quantize_rows(self, layout, keep_master, is_shard ? &none_known : nullptr);
}

Tensor quantize_placed(const Tensor& self, c10::string_view format_name, bool keep_master,
                       const LogicalPlace& place, const Groups& groups) {
  const Format& format = checked_arguments(self, format_name, keep_master);
  constexpr auto kOp = "qshard::_quantize_share";
  const Layout layout = layout_of(self.sizes(), format, place.logical_rows, place.row_offset,
                                  place.rows_of_each, kOp);
  TORCH_CHECK_VALUE(
      place.first_element >= 0 && place.full_cols >= layout.cols && place.full_matrix_rows >= 0,
      fmt::format("{}: {} columns from element {} do not lie within a tensor of {} "
                  "columns",
                  kOp, layout.cols, place.first_element, place.full_cols));
  const Layout placed =
      layout.within_full_tensor(place.first_element, place.full_cols, place.full_matrix_rows);
  return quantize_rows(self, checked_sizes(kOp, placed), keep_master, &groups);
}

Tensor dequantize(const Tensor& self, std::optional<at::ScalarType> dtype_arg) {
  quantized_buffer(self, "qshard::dequantize");
  const BufferPtr& buffer = impl_of(self).buffer();
  const auto dtype = dtype_arg.value_or(buffer->dtype());
  TORCH_CHECK_TYPE(at::isFloatingType(dtype),
                   fmt::format("qshard::dequantize: expected a floating point dtype, got {}",
                               c10::toString(dtype)));
  ensure_codes_current(buffer, "qshard::dequantize");
  PlainGuard guard;
  const auto kernel_dtype = is_value_dtype(dtype) ? dtype : at::kFloat;
  Tensor result;
  if (const auto rows = row_window(self)) {
    result = dequantized_rows(*buffer, *rows, kernel_dtype).view(self.sizes());
  } else {
    result =
        window(dequantized_rows(*buffer, kernel_dtype), self).clone(at::MemoryFormat::Contiguous);
  }
  return result.to(dtype);
}

bool is_quantized_op(const Tensor& self) { return is_quantized(self); }

std::string format(const Tensor& self) {
  return std::string(quantized_buffer(self, "qshard::format").layout().format->name);
}

Tensor codes(const Tensor& self) {
  check_has_rowwise_image(quantized_buffer(self, "qshard::codes").layout(), "qshard::codes");
  ensure_codes_current(impl_of(self).buffer(), "qshard::codes");
  return watched(codes_in_image(self, 0, "qshard::codes"), self);
}

Tensor columnwise_codes(const Tensor& self) {
  const Layout& layout = columnwise_buffer(self, "qshard::columnwise_codes").layout();
  return watched(codes_in_image(self, layout.columnwise_offset(), "qshard::columnwise_codes"),
                 self);
}

Tensor columnwise_scale_inv(const Tensor& self) {
  const QuantizedBuffer& buffer = columnwise_buffer(self, "qshard::columnwise_scale_inv");
  const Layout layout = buffer.layout().columnwise();
  const int64_t block = layout.format->scale.block_rows;
  const auto rows = row_window(self);
  const int64_t first = rows ? std::max<int64_t>(layout.row_offset, 0) + rows->first : -1;
  TORCH_CHECK_VALUE(rows && self.dim() >= 2 && first % block == 0 && self.size(-2) % block == 0,
                    fmt::format("qshard::columnwise_scale_inv: {} with strides {} is not a window "
                                "of whole blocks of {} rows",
                                describe(self), self.strides().vec(), block));
  PlainGuard guard;
  // Each row of a block holds a slice of its scales; the last slices may be short or empty.
  const auto slices =
      buffer.planes()
          .image()
          .narrow(0, rows->first, rows->count)
          .narrow(1, buffer.layout().columnwise_offset() + layout.row_scale_offset(),
                  layout.row_scale_bytes())
          .operand();
  c10::DimVector sizes(self.sizes());
  sizes[sizes.size() - 2] /= block;
  const auto scales = slices.reshape({rows->count / block, block * layout.row_scale_bytes()})
                          .narrow(1, 0, layout.cols)
                          .contiguous();
  return scales.view(at::kFloat8_e8m0fnu).view(sizes);
}

Tensor scale_inv(const Tensor& self) {
  QuantizedBuffer& buffer = quantized_buffer(self, "qshard::scale_inv");
  check_has_rowwise_image(buffer.layout(), "qshard::scale_inv");
  ensure_codes_current(impl_of(self).buffer(), "qshard::scale_inv");
  const Layout& layout = buffer.layout();
  const auto rows = row_window(self);
  TORCH_CHECK_VALUE(rows,
                    fmt::format("qshard::scale_inv: {} with strides {} is not a window of whole "
                                "rows",
                                describe(self), self.strides().vec()));
  PlainGuard guard;
  if (layout.format->scale.is_in_grid()) return watched(grid_of_rows(self, *rows), self);
  const auto scales = PlaneAccess(buffer)
                          .image()
                          .view(scalar_type(layout.format->scale.dtype))
                          .narrow(0, rows->first, rows->count)
                          .narrow(1, layout.row_scale_offset(), layout.row_scale_bytes());
  if (self.dim() == 2) return watched(scales, self);
  c10::DimVector sizes(self.sizes());
  sizes.back() = layout.row_scale_bytes();
  return watched(scales.view(sizes), self);
}

Tensor tensor_scale_inv(const Tensor& self) {
  const Format& format = *quantized_buffer(self, "qshard::tensor_scale_inv").layout().format;
  TORCH_CHECK_VALUE(format.outer_scale.has_value(),
                    fmt::format("qshard::tensor_scale_inv: {} has no scale above those that "
                                "qshard::scale_inv gives",
                                describe(self)));
  ensure_codes_current(impl_of(self).buffer(), "qshard::tensor_scale_inv");
  const auto rows = row_window(self);
  TORCH_CHECK_VALUE(rows, fmt::format("qshard::tensor_scale_inv: {} with strides {} is not a "
                                      "window of whole rows",
                                      describe(self), self.strides().vec()));
  PlainGuard guard;
  return watched(grid_of_rows(self, *rows), self);
}

OptionalTensor master(const Tensor& self) {
  QuantizedBuffer& buffer = quantized_buffer(self, "qshard::master");
  if (!buffer.keeps_master()) return std::nullopt;
  PlainGuard guard;
  buffer.arrivals().settle(buffer);
  const PlaneAccess access(buffer);
  auto alias = window(access.master(), self);
  // One counter for the plane and its aliases: in-place loads through an alias mark it written.
  alias.unsafeGetTensorImpl()->set_version_counter(buffer.counters().of_codes());
  note_master_alias(impl_of(self).buffer());
  return alias;
}

void flush_op(at::TensorList self) {
  std::vector<BufferPtr> buffers;
  for (const Tensor& tensor : self) {
    quantized_buffer(tensor, "qshard::flush");
    buffers.push_back(impl_of(tensor).buffer());
  }
  flush_any_written(buffers);
}

}  // namespace qshard
