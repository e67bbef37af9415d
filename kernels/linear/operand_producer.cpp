#include "kernels/linear/operand_producer.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "kernels/linear/block_scaled_operand.h"
#include "kernels/linear/linear_fp8.h"
#include "kernels/linear/shared_activation.h"

namespace qshard {
namespace {

[[noreturn]] void no_packed_codes(const at::Tensor& values) {
  TORCH_CHECK(false, fmt::format("qshard: {} has no FP8 GEMM for a matrix of shape {}",
                                 values.device().str(), values.sizes()));
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
  const bool is_packed = request.arrangement == Arrangement::kPacked;
  const Format& format = *request.format;
  if (is_packed && matrix.code_dtype != packed_code_dtype(format, request.role)) {
    return request.orientations;
  }
  const auto [rowwise, columnwise] = request.orientations;
  const ScaleMode rows = packed_scale_mode(format);
  const ScaleMode columns = packed_columns_scale_mode(format, request.role);
  return {.rowwise = rowwise && !(matrix.has({.rowwise = true}, request.arrangement) &&
                                  is_of_format(matrix.rowwise, format, rows)),
          .columnwise = columnwise && !(matrix.has({.columnwise = true}, request.arrangement) &&
                                        is_of_format(matrix.columnwise, format, columns))};
}

}  // namespace

QuantizedMatrix PlainOperand::codes(const OperandRequest& request) const {
  if (request.arrangement == Arrangement::kPacked) {
    if (values_.is_cuda()) return cuda::quantize_activation(values_, request, amax_);
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
  const bool is_shared =
      input_.tensor.defined() && !request.delayed && request.arrangement == Arrangement::kPacked;
  if (is_shared) return cuda::quantize_shared_activation(input_, values_, request);
  return PlainOperand::codes(request);
}

QuantizedMatrix CachedOperand::codes(const OperandRequest& request) const {
  if (request.arrangement != Arrangement::kPacked) return source_.codes(request);
  if (!made_.has(request.orientations, Arrangement::kPacked)) {
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

}  // namespace qshard
