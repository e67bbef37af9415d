#include "kernels/linear/operand_producer.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "kernels/activation/quantize_cpu.h"
#include "kernels/activation/repack_cpu.h"
#include "kernels/device/current_stream.h"
#include "kernels/format/value_dtype.h"
#include "kernels/format/whole_layout.h"
#include "kernels/linear/block_scaled_operand.h"
#include "kernels/linear/input_code_cache.h"
#include "kernels/linear/linear_fp8.h"

namespace qshard {
namespace {

[[noreturn]] void no_packed_codes(const at::Tensor& values) {
  TORCH_CHECK(false, fmt::format("qshard: {} has no FP8 GEMM for a matrix of shape {}",
                                 values.device().str(), values.sizes()));
}

at::Tensor zero_bytes(int64_t bytes) {
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte));
}

// The amax that scales all of x; delayed scaling collects x's own.
float amax_in_use(const at::Tensor& x, const OperandRequest& request, at::Tensor& amax) {
  if (request.delayed) {
    const at::Tensor own = activation_amax(x);
    delay_amax(own.mutable_data_ptr<float>(), request.delayed, current_stream(x.device()));
    return *own.const_data_ptr<float>();
  }
  if (!amax.defined()) amax = activation_amax(x);
  return *amax.const_data_ptr<float>();
}

// x as its rows are quantized.
at::Tensor values_of_rows(const at::Tensor& x, const OperandRequest& request) {
  return request.column_factors.defined() ? x.to(at::kFloat).mul(request.column_factors) : x;
}

// `values`: x for its rows, its transpose for its columns.
void fill(const PackedCodes& packed, const at::Tensor& values, const QuantizedMatrix& of,
          float amax) {
  auto* bytes = static_cast<uint8_t*>(packed.buffer.mutable_data_ptr());
  const cpu::PackedRowsTask task{
      .values = values.const_data_ptr(),
      .value_dtype = value_dtype(values.scalar_type()),
      .rows = values.size(0),
      .cols = values.size(1),
      .code_dtype = of.code_dtype,
      .power_of_two = of.format->activations.power_of_two_scales,
      .codes = bytes,
      .padded_rows = packed.rows,
      .ld = packed.ld,
      .scale_inv = reinterpret_cast<float*>(bytes + packed.code_bytes())};
  switch (packed.scale_mode) {
    case ScaleMode::kTensor:
      return cpu::quantize_packed_rows(task, amax);
    case ScaleMode::kRow:
      return cpu::quantize_packed_rows_1xk(task);
    case ScaleMode::kBlock128x128:
      return cpu::quantize_packed_rows_128x128(task);
    default:
      return cpu::quantize_packed_rows_1x128(task);
  }
}

// As cuda::quantize_activation (kernels/linear/linear_fp8.h) on the CPU: the same bits.
QuantizedMatrix quantize_activation_cpu(const at::Tensor& x, const OperandRequest& request,
                                        at::Tensor& amax) {
  const at::Tensor values = x.contiguous();
  const int64_t m = x.size(0);
  const int64_t k = x.size(1);
  const auto [rows, columns] = request.orientations;
  const QuantizedMatrix out = packed_matrix(request, m, k, zero_bytes);
  const bool has_one_scale = packed_scale_mode(*request.format) == ScaleMode::kTensor;
  const float known = has_one_scale ? amax_in_use(values, request, amax) : 0.f;
  if (rows) {
    fill(std::get<PackedCodes>(out.rowwise), values_of_rows(values, request), out, known);
  }
  if (columns) fill(std::get<PackedCodes>(out.columnwise), values.t().contiguous(), out, known);
  return out;
}

// As cuda::repack_activation on the CPU: the same bits.
QuantizedMatrix repack_activation_cpu(const QuantizedMatrix& rows, const OperandRequest& request) {
  const auto out = arrived_matrix(rows, request, [](int64_t count) {
    return at::empty({count}, at::TensorOptions().dtype(at::kByte));
  });
  const RowImage& image = rows.row_image();
  cpu::RepackTask task{.image = image.image.const_data_ptr<uint8_t>(),
                       .pitch = image.layout.row_bytes(),
                       .scale_offset = image.layout.row_scale_offset(),
                       .has_row_scale = has_row_scale(rows),
                       .rows = rows.rows,
                       .cols = rows.cols};
  const auto set_output = [&](const PackedCodes& packed) {
    if (!packed.other_scales.defined()) {
      task.codes = static_cast<uint8_t*>(packed.buffer.mutable_data_ptr());
    }
    task.padded_rows = packed.rows;
    task.ld = packed.ld;
    task.scale_inv = packed.mutable_scale_data();
  };
  if (const auto* packed = std::get_if<PackedCodes>(&out.rowwise)) {
    set_output(*packed);
    task.has_row_scale ? cpu::read_row_scales(task) : cpu::repack_rows(task);
  }
  if (const auto* packed = std::get_if<PackedCodes>(&out.columnwise)) {
    set_output(*packed);
    cpu::repack_columns(task, packed->scale_mode);
  }
  return out;
}

bool is_of_format(const CodeImage& codes, const Format& format, ScaleMode scale_mode) {
  if (const auto* rows = std::get_if<RowImage>(&codes)) {
    return rows->layout.format->name == activation_format(format).name;
  }
  const auto* packed = std::get_if<PackedCodes>(&codes);
  return packed != nullptr && packed->scale_mode == scale_mode;
}

// The codes asked for that a GEMM cannot read the matrix's for.
Orientations missing(const QuantizedMatrix& matrix, const OperandRequest& request) {
  const bool is_packed = request.operand_layout == OperandLayout::kPacked;
  const Format& format = *request.format;
  if (is_packed && matrix.code_dtype != packed_code_dtype(format, request.role)) {
    return request.orientations;
  }
  const auto [rowwise, columnwise] = request.orientations;
  const ScaleMode rows = packed_scale_mode(format);
  const ScaleMode columns = packed_columns_scale_mode(format, request.role);
  const bool has_factors = request.column_factors.defined();  // which no matrix has met yet
  return {.rowwise =
              rowwise && (has_factors || !(matrix.has({.rowwise = true}, request.operand_layout) &&
                                           is_of_format(matrix.rowwise, format, rows))),
          .columnwise = columnwise && !(matrix.has({.columnwise = true}, request.operand_layout) &&
                                        is_of_format(matrix.columnwise, format, columns))};
}

}  // namespace

QuantizedMatrix PlainOperand::codes(const OperandRequest& request) const {
  if (request.operand_layout == OperandLayout::kPacked) {
    if (values_.is_cuda()) return cuda::quantize_activation(values_, request, amax_);
    const bool is_read = values_.is_cpu() && request.format->emulated;
    if (is_read) return quantize_activation_cpu(values_, request, amax_);
    no_packed_codes(values_);
  }
  const Format& format = *request.format;
  QuantizedMatrix out{&format, activation_format(format).code_dtype, values_.size(0),
                      values_.size(1)};
  const Orientations asked = request.orientations;
  if (asked.rowwise) out.rowwise = quantized_rows(values_, format, request.rounding);
  if (asked.columnwise) out.columnwise = quantized_columns(values_, format, request.rounding);
  return out;
}

void PlainOperand::collect_amax(const DelayedAmax& delayed) const {
  qshard::collect_amax(values_, delayed);
}

QuantizedMatrix SharedOperand::codes(const OperandRequest& request) const {
  const bool is_shared = values_.is_cuda() && input_.tensor.defined() && !request.delayed &&
                         request.operand_layout == OperandLayout::kPacked;
  if (is_shared) return cuda::quantize_cached_activation(input_, values_, request);
  return PlainOperand::codes(request);
}

QuantizedMatrix CachedOperand::codes(const OperandRequest& request) const {
  if (request.operand_layout != OperandLayout::kPacked) return source_.codes(request);
  const bool has_factors = request.orientations.rowwise && request.column_factors.defined();
  if (has_factors || !made_.has(request.orientations, OperandLayout::kPacked)) {
    OperandRequest all = request;
    all.orientations.rowwise |= asked_.rowwise;
    all.orientations.columnwise |= asked_.columnwise;
    made_ = source_.codes(all);
    has_amax_ = true;
  }
  return made_;
}

void CachedOperand::collect_amax(const DelayedAmax& delayed) const {
  if (!has_amax_) source_.collect_amax(delayed);
  has_amax_ = true;
}

QuantizedMatrix QuantizedOperand::codes(const OperandRequest& request) const {
  OperandRequest rest = request;
  rest.orientations = missing(codes_, request);
  if (!rest.orientations.rowwise && !rest.orientations.columnwise) return codes_;
  QuantizedMatrix made = PlainOperand(values(dtype())).codes(rest);
  const Orientations asked = request.orientations;
  if (asked.rowwise && !rest.orientations.rowwise) made.rowwise = codes_.rowwise;
  if (asked.columnwise && !rest.orientations.columnwise) made.columnwise = codes_.columnwise;
  return made;
}

at::Tensor QuantizedOperand::values(at::ScalarType dtype) const {
  return values_.defined() ? values_ : dequantized(codes_, dtype);
}

void QuantizedOperand::collect_amax(const DelayedAmax& delayed) const {
  if (values_.defined()) qshard::collect_amax(values_, delayed);
}

ArrivedOperand::ArrivedOperand(const RowImage& image, int64_t rows,
                               const at::TensorOptions& options)
    : OperandProducer(options), sizes_{rows, image.layout.cols} {
  const Layout layout = whole_layout(*image.layout.format, rows, image.layout.cols);
  const ReadOnlyTensor bytes = image.image.view({image.layout.rows, image.layout.row_bytes()});
  rows_ = matrix_of({layout, bytes.narrow(0, image.first_row, rows), at::Tensor()}, rows);
}

ArrivedOperand ArrivedOperand::narrowed(int64_t first, int64_t count) const {
  RowImage image = rows_.row_image();
  image.first_row = first;
  return {image, count, options()};
}

QuantizedMatrix ArrivedOperand::codes(const OperandRequest& request) const {
  const Format& format = *request.format;
  if (!meets(format)) return PlainOperand(values(dtype())).codes(request);
  if (request.operand_layout == OperandLayout::kPacked) return packed(request);
  QuantizedMatrix out = rows_;
  out.format = &format;
  // In float32 each code times its scale is exact.
  if (request.orientations.columnwise) {
    out.columnwise = quantized_columns(values(at::kFloat), format, request.rounding);
  }
  return out;
}

QuantizedMatrix ArrivedOperand::packed(const OperandRequest& request) const {
  const bool emulated = request.format->emulated;
  if (device().is_cpu() && !emulated) no_packed_codes(values(dtype()));
  // Only these GEMMs multiply by a scale for each row.
  const bool is_read =
      emulated || !has_row_scale(rows_) || cuda::has_fp8_gemm(device(), ScaleMode::kRow);
  if (!is_read) return PlainOperand(values(dtype())).codes(request);
  const auto repacked = [&](const OperandRequest& asked) {
    return device().is_cuda() ? cuda::repack_activation(rows_, asked)
                              : repack_activation_cpu(rows_, asked);
  };
  if (!request.orientations.rowwise || !request.column_factors.defined()) return repacked(request);
  // Codes of rows whose columns are multiplied are other ones, and those of columns are not.
  OperandRequest of_rows = request, of_columns = request;
  of_rows.orientations.columnwise = of_columns.orientations.rowwise = false;
  QuantizedMatrix out = PlainOperand(values(at::kFloat)).codes(of_rows);
  if (request.orientations.columnwise) out.columnwise = repacked(of_columns).columnwise;
  return out;
}

void ArrivedOperand::collect_amax(const DelayedAmax& delayed) const {
  if (delayed) qshard::collect_amax(values(dtype()), delayed);
}

}  // namespace qshard
