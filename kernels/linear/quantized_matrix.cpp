#include "kernels/linear/quantized_matrix.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/device/current_stream.h"
#include "kernels/format/value_dtype.h"
#include "kernels/quantize/quantize.h"

namespace qshard {
namespace {

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

bool is_there(const CodeImage& codes, OperandLayout operand_layout) {
  return operand_layout == OperandLayout::kRowImage ? std::holds_alternative<RowImage>(codes)
                                                    : std::holds_alternative<PackedCodes>(codes);
}

// `columnwise`: from that image, if the format has one.
at::Tensor values_of(const RowImage& rows, int64_t count, at::ScalarType dtype, bool columnwise) {
  const bool direct = is_value_dtype(dtype);
  at::Tensor values =
      at::empty({count, rows.layout.cols}, rows.image.options().dtype(direct ? dtype : at::kFloat));
  DequantizeTask task;
  task.layout = rows.layout;
  task.image = static_cast<const uint8_t*>(rows.image.const_data_ptr());
  task.grid = rows.grid.defined() ? rows.grid.const_data_ptr<float>() : nullptr;
  task.first_row = rows.first_row;
  task.rows = count;
  task.value_dtype = value_dtype(values.scalar_type());
  task.values = values.mutable_data_ptr();
  task.columnwise = columnwise && rows.layout.format->columnwise;
  dequantize({&task, 1}, current_stream(rows.image.device()));
  return direct ? values : values.to(dtype);
}

// All rows and codes, padding included, in fp32.
at::Tensor values_of(const PackedCodes& codes, DType code_dtype) {
  const at::Tensor values = packed_codes(codes, code_dtype).to(at::kFloat);
  if (codes.scale_mode == ScaleMode::kTensor) return values.mul(codes.scales());
  if (codes.scale_mode == ScaleMode::kRow) return values.mul(codes.scales().unsqueeze(1));
  const int64_t blocks = ceil_div(codes.ld, 128);
  const at::Tensor by_row = packed_block_scales(codes);
  if (codes.ld % 128 != 0) {
    return values.mul(by_row.repeat_interleave(128, 1).narrow(1, 0, codes.ld));
  }
  return values.view({codes.rows, blocks, 128})
      .mul(by_row.unsqueeze(2))
      .view({codes.rows, codes.ld});
}

}  // namespace

bool QuantizedMatrix::has(Orientations asked, OperandLayout operand_layout) const {
  return (!asked.rowwise || is_there(rowwise, operand_layout)) &&
         (!asked.columnwise || is_there(columnwise, operand_layout));
}

at::Tensor bytes_of(const CodeImage& codes) {
  return std::visit(Overloaded{[](std::monostate) { return at::Tensor(); },
                               [](const RowImage& rows) { return rows.image.operand(); },
                               [](const PackedCodes& packed) { return packed.buffer; }},
                    codes);
}

QuantizedMatrix matrix_of(RowImage image, int64_t rows) {
  QuantizedMatrix matrix;
  matrix.format = image.layout.format;
  matrix.code_dtype = image.layout.format->code_dtype;
  matrix.rows = rows;
  matrix.cols = image.layout.cols;
  matrix.rowwise = std::move(image);
  return matrix;
}

int64_t packed_rowwise_bytes(int64_t m, int64_t k) {
  const int64_t rows = round_up(m, 16);
  return rows * round_up(k, 16) + 4 * rows * ceil_div(k, 128);
}

int64_t packed_columnwise_bytes(int64_t m, int64_t k) {
  return round_up(k, 16) * (round_up(m, 128) + 4 * ceil_div(m, 128));
}

at::Tensor packed_codes(const PackedCodes& codes, DType code_dtype) {
  const auto type = code_dtype == DType::kFloat8E5M2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
  return codes.buffer.narrow(0, 0, codes.code_bytes()).view({codes.rows, codes.ld}).view(type);
}

namespace {

/// How many scales there are.
int64_t scale_count(const PackedCodes& codes) {
  const int64_t blocks = ceil_div(codes.ld, 128);
  switch (codes.scale_mode) {
    case ScaleMode::kTensor:
      return 1;
    case ScaleMode::kRow:
      return codes.rows;
    case ScaleMode::kBlock128x128:
      return ceil_div(codes.rows, 128) * round_up(blocks, 4);
    default:
      return blocks * codes.rows;
  }
}

}  // namespace

at::Tensor PackedCodes::scales() const {
  if (other_scales.defined()) return other_scales;
  const auto bytes = scale_count(*this) * static_cast<int64_t>(sizeof(float));
  return buffer.narrow(0, code_bytes(), bytes).view(at::kFloat);
}

const float* PackedCodes::scale_data() const {
  if (other_scales.defined()) return other_scales.const_data_ptr<float>();
  const auto* codes = static_cast<const uint8_t*>(buffer.const_data_ptr());
  return reinterpret_cast<const float*>(codes + code_bytes());
}

float* PackedCodes::mutable_scale_data() const {
  if (other_scales.defined()) return other_scales.mutable_data_ptr<float>();
  auto* codes = static_cast<uint8_t*>(buffer.mutable_data_ptr());
  return reinterpret_cast<float*>(codes + code_bytes());
}

QuantizedMatrix multiplied(QuantizedMatrix packed, const at::Tensor& factor) {
  for (CodeImage* image : {&packed.rowwise, &packed.columnwise}) {
    if (auto* codes = std::get_if<PackedCodes>(image)) {
      codes->other_scales = codes->scales().mul(factor);
    }
  }
  return packed;
}

at::Tensor packed_block_scales(const PackedCodes& codes) {
  const int64_t blocks = ceil_div(codes.ld, 128);
  if (codes.scale_mode == ScaleMode::kBlock128x128) {
    const at::Tensor grid = codes.scales().view({ceil_div(codes.rows, 128), round_up(blocks, 4)});
    return grid.narrow(1, 0, blocks).repeat_interleave(128, 0).narrow(0, 0, codes.rows);
  }
  return codes.scales().view({blocks, codes.rows}).t();
}

namespace {

int shift_of(int64_t block_cols) {
  return block_cols == 0 ? CodedMatrix::kAllColumns
                         : std::countr_zero(static_cast<uint64_t>(block_cols));
}

void set_codes(const RowImage& rows, CodedMatrix& coded) {
  const Layout& layout = rows.layout;
  const Format& format = *layout.format;
  const int64_t pitch = layout.row_bytes();
  coded.codes = static_cast<const uint8_t*>(rows.image.const_data_ptr()) + rows.first_row * pitch;
  coded.code_pitch = pitch;
  coded.bytes = coded.rows * pitch;
  if (!format.scale.is_in_grid()) {
    coded.row_scales = coded.codes + layout.row_scale_offset();
    coded.row_scale = row_scale_of(format.scale);
    coded.row_scale_shift = shift_of(format.scale.block_cols);
  }
  const ScaleLevel* level = format.grid_scale();
  if (level == nullptr) return;
  coded.scales = rows.grid.const_data_ptr<float>();
  coded.first_row = layout.row_offset + rows.first_row;
  coded.matrix_rows = layout.matrix_rows;
  coded.block_rows = static_cast<uint32_t>(level->block_rows);
  coded.block_rows_per_matrix = layout.grid_rows() / std::max<int64_t>(layout.matrices(), 1);
  coded.col_shift = shift_of(level->block_cols);
  coded.row_block_pitch = layout.grid_cols();
  coded.col_block_pitch = 1;
  coded.bytes += 4 * layout.grid_numel();
}

void set_codes(const PackedCodes& packed, CodedMatrix& coded) {
  const int64_t blocks = ceil_div(packed.ld, 128);
  const bool by_row = packed.scale_mode != ScaleMode::kTensor;
  const bool in_blocks = packed.scale_mode == ScaleMode::kBlock1x128;
  coded.codes = static_cast<const uint8_t*>(packed.buffer.const_data_ptr());
  coded.code_pitch = packed.ld;
  coded.scales = packed.scale_data();
  coded.matrix_rows = packed.rows;
  coded.block_rows = by_row ? 1 : 0;
  coded.row_block_pitch = by_row ? 1 : 0;
  coded.col_shift = shift_of(in_blocks ? 128 : 0);
  coded.col_block_pitch = in_blocks ? packed.rows : 0;
  const int64_t scales = in_blocks ? packed.rows * blocks : by_row ? packed.rows : 1;
  coded.bytes = packed.code_bytes() + 4 * scales;
}

}  // namespace

CodedMatrix coded_matrix(const QuantizedMatrix& matrix, const ReadOnlyTensor& values,
                         const at::Tensor& column_factors) {
  CodedMatrix coded;
  coded.rows = matrix.rows;
  coded.cols = matrix.cols;
  coded.values = values.const_data_ptr();
  coded.value_dtype = value_dtype(values.scalar_type());
  if (column_factors.defined()) coded.column_factors = column_factors.const_data_ptr<float>();
  coded.code_dtype = matrix.code_dtype;
  std::visit(Overloaded{[&](std::monostate) {
                          TORCH_CHECK(false, "qshard: no statistics of a ", matrix.rows, " x ",
                                      matrix.cols, " matrix without rowwise codes");
                        },
                        [&](const auto& codes) { set_codes(codes, coded); }},
             matrix.rowwise);
  return coded;
}

QuantizedMatrix packed_matrix(const Format& format, OperandRole role, int64_t m, int64_t k,
                              const at::Tensor& rowwise, const at::Tensor& columnwise) {
  const ScaleMode mode = packed_scale_mode(format);
  QuantizedMatrix matrix{&format, packed_code_dtype(format, role), m, k};
  if (rowwise.defined()) {
    // cuBLASLt takes any number of tokens; 1x128 scales come in aligned columns.
    const int64_t rows = mode == ScaleMode::kBlock1x128 ? round_up(m, 16) : m;
    matrix.rowwise = PackedCodes{rowwise, rows, round_up(k, 16), mode};
  }
  if (columnwise.defined()) {
    matrix.columnwise = PackedCodes{columnwise, round_up(k, 16), round_up(m, 128),
                                    packed_columns_scale_mode(format, role)};
  }
  return matrix;
}

at::Tensor weight_row_scales(const QuantizedMatrix& weight) {
  const RowImage& window = weight.row_image();
  const Layout& layout = window.layout;
  const int64_t first = layout.grid_row(layout.row_offset + window.first_row);
  return window.grid.operand().view({-1}).narrow(0, first, weight.rows);
}

at::Tensor dequantized(const QuantizedMatrix& matrix, at::ScalarType dtype) {
  const int64_t m = matrix.rows;
  const int64_t k = matrix.cols;
  if (const auto* rows = std::get_if<RowImage>(&matrix.rowwise)) {
    return values_of(*rows, m, dtype, /*columnwise=*/false);
  }
  if (const auto* packed = std::get_if<PackedCodes>(&matrix.rowwise)) {
    return values_of(*packed, matrix.code_dtype).narrow(0, 0, m).narrow(1, 0, k).to(dtype);
  }
  if (const auto* packed = std::get_if<PackedCodes>(&matrix.columnwise)) {
    return values_of(*packed, matrix.code_dtype).narrow(0, 0, k).narrow(1, 0, m).t().to(dtype);
  }
  const auto* columns = std::get_if<RowImage>(&matrix.columnwise);
  TORCH_CHECK(columns != nullptr && !columns->layout.format->activations.hadamard_columns,
              fmt::format("qshard: a {} matrix of {} x {} has no codes that its values can be read "
                          "from; quantize it rowwise",
                          matrix.format ? matrix.format->name : "quantized", m, k));
  return values_of(*columns, k, dtype, /*columnwise=*/false).narrow(1, 0, m).t();
}

at::Tensor dequantized_columnwise(const QuantizedMatrix& weight, at::ScalarType dtype) {
  return values_of(weight.row_image(), weight.rows, dtype, /*columnwise=*/true);
}

}  // namespace qshard
