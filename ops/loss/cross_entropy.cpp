#include "kernels/loss/cross_entropy.h"

#include <fmt/format.h>

#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "ops/linear/linear_operands.h"
#include "ops/loss/linear_cross_entropy.h"

namespace qshard {
namespace {

constexpr const char* kLossOp = "qshard::cross_entropy_and_gradient";

/// The format whose codes are asked for; null for values.
const Format* checked_request(const Tensor& logits, OptionalFormat grad_format, bool columns) {
  TORCH_CHECK_TYPE(logits.dim() >= 1 && is_value_dtype(logits.scalar_type()), kLossOp,
                   ": logits are float32, bfloat16 or float16 (..., words), got ",
                   logits.scalar_type(), " ", logits.sym_sizes());
  if (!grad_format) {
    TORCH_CHECK_VALUE(!columns, kLossOp, ": columns are codes; name grad_format, or ask for rows");
    return nullptr;
  }
  const Format& format = checked_format(*grad_format, kLossOp);
  TORCH_CHECK_VALUE(
      gives_gradients_in_codes(format),
      fmt::format("{}: a {} linear reads no codes of a gradient that were made without its weight; "
                  "leave grad_format out for values",
                  kLossOp, format.name));
  return &format;
}

}  // namespace

void check_targets(const char* op, const Tensor& x, const Tensor& target, double label_smoothing) {
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong, op, ": target must be int64 indices, got ",
                   target.scalar_type(),
                   "; call torch.nn.functional.cross_entropy for class probabilities");
  TORCH_CHECK(x.dim() == target.dim() + 1 &&
                  x.sym_sizes().slice(0, target.dim()).equals(target.sym_sizes()),
              op, ": target of shape ", target.sym_sizes(), " does not fit ", x.sym_sizes(),
              ", whose leading dimensions it must have");
  TORCH_CHECK_VALUE(label_smoothing >= 0. && label_smoothing <= 1., op,
                    ": label_smoothing must be between 0 and 1, got ", label_smoothing);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_and_gradient(
    const Tensor& logits, const Tensor& target, int64_t ignore_index, double label_smoothing,
    OptionalFormat grad_format, bool rows, bool columns) {
  PlainGuard guard;
  const Format* format = checked_request(logits, grad_format, columns);
  check_targets(kLossOp, logits, target, label_smoothing);
  c10::OptionalDeviceGuard device_guard(logits.device());
  const Tensor matrix = as_matrix(logits).contiguous();
  const CrossEntropy of{matrix, target.reshape({-1}).contiguous(), ignore_index, label_smoothing};
  const CrossEntropyLosses made = cross_entropy_losses(of);
  const Tensor none = none_of(logits.options().dtype(at::kByte));
  Tensor made_rows = none, made_columns = none;
  if (format == nullptr) {
    made_rows = rows ? cross_entropy_gradient(of, made.log_sums).view(logits.sizes())
                     : none_of(logits.options());
  } else if ((rows || columns) && matrix.numel() > 0) {
    const QuantizedMatrix codes =
        cross_entropy_codes(of, made.log_sums,
                            {.format = format,
                             .role = OperandRole::kGradient,
                             .orientations = {.rowwise = rows, .columnwise = columns}});
    made_rows = bytes_or_none(codes.rowwise, logits);
    made_columns = bytes_or_none(codes.columnwise, logits);
  }
  return {made.losses.view(target.sizes()), made.totals, made_rows, made_columns};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_and_gradient_meta(
    const Tensor& logits, const Tensor& target, int64_t, double label_smoothing,
    OptionalFormat grad_format, bool rows, bool columns) {
  const Format* format = checked_request(logits, grad_format, columns);
  check_targets(kLossOp, logits, target, label_smoothing);
  const auto floats = logits.options().dtype(at::kFloat);
  const Tensor losses = at::empty_symint(target.sym_sizes(), floats);
  const Tensor totals = at::empty({2}, floats);
  const auto bytes = logits.options().dtype(at::kByte);
  if (format == nullptr) {
    return {
        losses, totals,
        rows ? at::empty_symint(logits.sym_sizes(), logits.options()) : none_of(logits.options()),
        none_of(bytes)};
  }
  int64_t row_bytes = 0, column_bytes = 0;
  if (rows || columns) {  // then all sizes are known (ops/loss/linear_cross_entropy.cpp)
    const int64_t m = leading_numel(logits), v = logits.size(-1);
    if (rows) row_bytes = packed_rowwise_bytes(m, v);
    if (columns) column_bytes = packed_columnwise_bytes(m, v);
  }
  return {losses, totals, at::empty({row_bytes}, bytes), at::empty({column_bytes}, bytes)};
}

}  // namespace qshard
