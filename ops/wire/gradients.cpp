#include <fmt/format.h>

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/device/current_stream.h"
#include "kernels/format/checked_sizes.h"
#include "kernels/format/value_dtype.h"
#include "kernels/messages/gradient_message.h"
#include "ops/calls/ops.h"

namespace qshard {
namespace {

constexpr const char* kQuantize = "qshard::quantize_gradients";
constexpr const char* kSum = "qshard::sum_gradients";

MessageLayout layout_of(const char* op, c10::string_view format, const char* argument,
                        int64_t numel) {
  checked_product(op, argument, {numel});
  return {&find_message_format({format.data(), format.size()}), numel};
}

/// Messages that hold `values`.
MessageLayout messages_of(const Tensor& values, c10::string_view format, int64_t chunks,
                          int64_t chunk_numel) {
  const MessageLayout layout = layout_of(kQuantize, format, "chunk_numel", chunk_numel);
  const int64_t held = checked_product(kQuantize, "chunks x chunk_numel", {chunks, chunk_numel});
  TORCH_SYM_CHECK(values.sym_numel().sym_le(held),
                  fmt::format("{}: {} values do not fit {} messages of {}", kQuantize,
                              c10::str(values.sym_numel()), chunks, chunk_numel));
  TORCH_CHECK(is_value_dtype(values.scalar_type()),
              fmt::format("{}: values must be float32, bfloat16 or float16, got {}", kQuantize,
                          c10::toString(values.scalar_type())));
  return layout;
}

void check_rounding(const Tensor& values, const Tensor& rounding, int64_t first_noise) {
  TORCH_CHECK(rounding.scalar_type() == at::kInt && rounding.numel() == 3 &&
                  rounding.is_contiguous() && rounding.device() == values.device(),
              "qshard::quantize_gradients: rounding must be 3 contiguous int32 on ",
              values.device(), ", got ", rounding.sizes(), " of ", rounding.scalar_type(), " on ",
              rounding.device());
  TORCH_CHECK(product_fits({first_noise}) && first_noise % 16 == 0,
              "qshard::quantize_gradients: first_noise must be a multiple of 16 up to 2^50, got ",
              first_noise);
}

/// The layout of messages that `out` can be the sum of.
MessageLayout summed(const Tensor& messages, c10::string_view format, int64_t chunk_numel,
                     const Tensor& out) {
  const MessageLayout layout = layout_of(kSum, format, "chunk_numel", chunk_numel);
  TORCH_CHECK(messages.scalar_type() == at::kByte && messages.dim() == 3 &&
                  messages.size(2) == layout.bytes() && messages.is_contiguous(),
              kSum, ": expected contiguous uint8 messages of shape (chunks, peers, ",
              layout.bytes(), "), got ", describe(messages));
  TORCH_CHECK(messages.size(1) >= 1, kSum, ": no peer sent anything: messages of shape ",
              messages.sizes());
  const int64_t held =
      checked_product(kSum, "the sum of messages", {messages.size(0), chunk_numel});
  TORCH_CHECK(out.is_contiguous() && is_value_dtype(out.scalar_type()) && out.numel() <= held, kSum,
              ": out must be contiguous float32, bfloat16 or float16 of at most ", held,
              " values, got ", describe(out));
  return layout;
}

}  // namespace

Tensor quantize_gradients(const Tensor& values, c10::string_view format, int64_t chunks,
                          int64_t chunk_numel, const OptionalTensor& rounding,
                          int64_t first_noise) {
  const MessageLayout layout = messages_of(values, format, chunks, chunk_numel);
  if (rounding) check_rounding(values, *rounding, first_noise);
  const Tensor contiguous = values.contiguous();
  EncodeMessagesTask task;
  task.layout = layout;
  task.chunks = chunks;
  task.value_dtype = value_dtype(values.scalar_type());
  task.values = contiguous.const_data_ptr();
  task.numel = contiguous.numel();
  const c10::DeviceGuard guard(values.device());
  Tensor messages = at::empty({chunks, layout.bytes()}, values.options().dtype(at::kByte));
  task.messages = messages.mutable_data_ptr<uint8_t>();
  task.rounding = rounding ? rounding->const_data_ptr<int32_t>() : nullptr;
  task.first_noise = first_noise;
  encode_messages(task, current_stream(values.device()));
  return messages;
}

void sum_gradients(const Tensor& messages, c10::string_view format, int64_t chunk_numel,
                   const Tensor& out, double factor) {
  SumMessagesTask task;
  task.layout = summed(messages, format, chunk_numel, out);
  task.chunks = messages.size(0);
  task.peers = messages.size(1);
  task.messages = messages.const_data_ptr<uint8_t>();
  TORCH_CHECK(reinterpret_cast<uintptr_t>(task.messages) % 16 == 0, kSum,
              ": messages must begin at a multiple of 16 bytes; pass a clone");
  task.factor = static_cast<float>(factor);
  task.value_dtype = value_dtype(out.scalar_type());
  task.values = out.mutable_data_ptr();
  task.numel = out.numel();
  const c10::DeviceGuard guard(messages.device());
  sum_messages(task, current_stream(messages.device()));
}

Tensor quantize_gradients_meta(const Tensor& values, c10::string_view format, int64_t chunks,
                               int64_t chunk_numel, const OptionalTensor&, int64_t) {
  const MessageLayout layout = messages_of(values, format, chunks, chunk_numel);
  return at::empty({chunks, layout.bytes()}, values.options().dtype(at::kByte));
}

void sum_gradients_meta(const Tensor& messages, c10::string_view format, int64_t chunk_numel,
                        const Tensor& out, double) {
  find_message_format({format.data(), format.size()});
  const auto is_symbolic = [](const Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  if (!is_symbolic(messages) && !is_symbolic(out)) summed(messages, format, chunk_numel, out);
}

}  // namespace qshard
