#include "ops/wire/activations.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/device/capture.h"
#include "kernels/device/current_stream.h"
#include "kernels/format/checked_sizes.h"
#include "kernels/format/value_dtype.h"
#include "kernels/format/whole_layout.h"
#include "kernels/linear/block_scaled_operand.h"
#include "kernels/linear/linear_amax.h"
#include "kernels/messages/activation_message.h"
#include "kernels/statistics/watched.h"

namespace qshard {
namespace {

/// Tokens (..., K) of one rank, and the weight's format that they are quantized to meet.
struct Tokens {
  const Format& format;
  int64_t rows;
  int64_t cols;

  Tokens(const char* op, c10::string_view name, at::IntArrayRef size)
      : format(checked_format(name, op)), rows(0), cols(0) {
    TORCH_CHECK(
        format.code_bits == 8 && size.size() >= 2,
        fmt::format("{}: needs a format of one-byte codes and tokens (..., K), got {} and {}", op,
                    format.name, size));
    checked_product(op, "size", {size.data(), size.size()});
    rows = checked_product(op, "size", {size.data(), size.size() - 1});
    cols = size.back();
  }

  /// Whether they travel as rows that hold their scales; else as ActivationMessage.
  bool has_row_scales() const { return format.gemm.kind == GemmKind::kRowImages; }
  ActivationMessage message(bool is_gradient) const {
    return {format, is_gradient ? OperandRole::kGradient : OperandRole::kInput, rows, cols};
  }
  /// The layout of `ranks` ranks' activations, one after the other.
  Layout layout(int64_t ranks) const {
    return whole_layout(activation_format(format), ranks * rows, cols);
  }
  int64_t bytes() const {
    return has_row_scales() ? layout(1).image_bytes() : message(false).bytes();
  }
};

/// What a linear that will be given the decoded values cannot count.
CodedMatrix coded_message(const EncodeActivationTask& task) {
  const ActivationMessage& message = task.message;
  const bool in_blocks = !message.has_one_scale && message.block_cols < message.cols;
  return {.rows = message.rows,
          .cols = message.cols,
          .values = task.values,
          .value_dtype = task.value_dtype,
          .codes = task.bytes,
          .code_pitch = message.pitch(),
          .code_dtype = message.code_dtype,
          .scales = reinterpret_cast<const float*>(task.bytes + message.code_bytes()),
          .matrix_rows = message.rows,
          .block_rows = message.has_one_scale ? 0u : 1u,
          .col_shift = in_blocks ? std::countr_zero(static_cast<uint64_t>(message.block_cols))
                                 : CodedMatrix::kAllColumns,
          .row_block_pitch = message.has_one_scale ? 0 : 1,
          .col_block_pitch = message.has_one_scale ? 0 : message.rows,
          .bytes = message.used_bytes()};
}

}  // namespace

Tensor put_together(const Tensor& parts, at::IntArrayRef size, int64_t dim, at::IntArrayRef whole) {
  auto sizes = size.vec();
  sizes.insert(sizes.begin(), -1);
  return parts.view(sizes).movedim(0, dim).reshape(whole);
}

Tensor message_amax(const Tensor& self, c10::string_view format) {
  const Tokens tokens("qshard::_message_amax", format, self.sizes());
  if (tokens.has_row_scales() || !tokens.message(false).has_one_scale) {
    return at::empty({0}, self.options().dtype(at::kFloat));
  }
  const c10::OptionalDeviceGuard guard(self.device());
  if (self.numel() == 0) return at::zeros({1}, self.options().dtype(at::kFloat));
  return activation_amax(self.reshape({tokens.rows, tokens.cols}));
}

Tensor encode_activation_op(const Tensor& self, c10::string_view format, bool is_gradient,
                            const Tensor& amax) {
  const char* op = "qshard::_encode_activation";
  const Tokens tokens(op, format, self.sizes());
  const c10::OptionalDeviceGuard guard(self.device());
  const Tensor values = self.reshape({tokens.rows, tokens.cols}).contiguous();
  const bool is_counted = may_be_sampling() && values.numel() > 0 && !is_capturing(self.device());
  if (tokens.has_row_scales()) {
    const auto codes = matrix_of(quantized_rows(values, tokens.format, nullptr), tokens.rows);
    const Tensor out = bytes_of(codes.rowwise).view({-1});
    if (is_counted) keep_tally(out, coded_matrix(codes, values));
    return out;
  }
  EncodeActivationTask task{tokens.message(is_gradient)};
  TORCH_CHECK(!task.message.has_one_scale ||
                  (amax.numel() == 1 && amax.scalar_type() == at::kFloat && !has_key(amax)),
              op, ": needs the amax of all ranks, one float32, got ", describe(amax));
  task.values = values.const_data_ptr();
  task.value_dtype = value_dtype(values.scalar_type());
  if (task.message.has_one_scale) task.amax = amax.const_data_ptr<float>();
  const Tensor out = at::empty({task.message.bytes()}, self.options().dtype(at::kByte));
  task.bytes = out.mutable_data_ptr<uint8_t>();
  encode_activation(task, current_stream(self.device()));
  if (is_counted) keep_tally(out, coded_message(task));
  return out;
}

Tensor decode_activations_op(const Tensor& messages, c10::string_view format, bool is_gradient,
                             at::IntArrayRef size, int64_t dim, at::ScalarType dtype) {
  const char* op = "qshard::_decode_activations";
  const Tokens tokens(op, format, size);
  TORCH_CHECK_TYPE(is_value_dtype(dtype),
                   fmt::format("{}: dtype must be float32, bfloat16 or float16, got {}", op,
                               c10::toString(dtype)));
  const auto last = static_cast<int64_t>(size.size()) - 1;
  const int64_t bytes = tokens.bytes();
  TORCH_CHECK(dim >= 0 && dim < last && messages.scalar_type() == at::kByte &&
                  messages.is_contiguous() && bytes > 0 && messages.numel() % bytes == 0 &&
                  reinterpret_cast<uintptr_t>(messages.const_data_ptr()) % 16 == 0,
              fmt::format("{}: needs contiguous uint8 messages of {} bytes of tokens {}, to be put "
                          "together along one of their first {} dimensions, got {} bytes and {}",
                          op, bytes, size, last, messages.numel(), dim));
  const int64_t ranks = messages.numel() / bytes;
  checked_product(op, "size of all ranks", {ranks, tokens.rows, tokens.cols});
  checked_product(op, "size of all ranks", {ranks, size[dim]});
  auto whole = size.vec();
  whole[dim] *= ranks;
  const c10::OptionalDeviceGuard guard(messages.device());
  const auto options = messages.options().dtype(dtype);
  if (tokens.rows == 0 || tokens.cols == 0) return at::empty(whole, options);
  if (tokens.has_row_scales()) {
    const Layout layout = tokens.layout(ranks);
    RowImage rows{layout, messages.view({layout.rows, layout.row_bytes()}), Tensor()};
    return put_together(dequantized(matrix_of(std::move(rows), layout.rows), dtype), size, dim,
                        whole);
  }
  DecodeActivationsTask task{tokens.message(is_gradient)};
  task.messages = messages.const_data_ptr<uint8_t>();
  task.ranks = ranks;
  task.inner = c10::multiply_integers(size.slice(dim, last - dim));
  Tensor out = at::empty(whole, options);
  task.values = out.mutable_data_ptr();
  task.value_dtype = value_dtype(dtype);
  decode_activations(task, current_stream(messages.device()));
  return out;
}

}  // namespace qshard
