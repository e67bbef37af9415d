#include <fmt/format.h>

#include "kernels/current_stream.h"
#include "kernels/gradient_message.h"
#include "kernels/value_dtype.h"
#include "ops/ops.h"

namespace qshard {
namespace {

MessageLayout layout_of(const char* op, c10::string_view format, int64_t numel) {
  TORCH_CHECK(numel >= 0, fmt::format("{}: a message cannot have {} values", op, numel));
  return {&find_message_format({format.data(), format.size()}), numel};
}

void check_rounding(const Tensor& values, const Tensor& rounding, int64_t first_noise) {
  TORCH_CHECK(rounding.scalar_type() == at::kInt && rounding.numel() == 3 &&
                  rounding.is_contiguous() && rounding.device() == values.device(),
              "qshard::quantize_gradients: rounding must be 3 contiguous int32 on ",
              values.device(), ", got ", rounding.sizes(), " of ", rounding.scalar_type(), " on ",
              rounding.device());
  TORCH_CHECK(first_noise >= 0 && first_noise % 16 == 0,
              "qshard::quantize_gradients: first_noise must be a multiple of 16, got ",
              first_noise);
}

}  // namespace

int64_t gradient_message_bytes(c10::string_view format, int64_t numel) {
  return layout_of("qshard::_gradient_message_bytes", format, numel).bytes();
}

Tensor quantize_gradients(const Tensor& values, c10::string_view format, int64_t chunks,
                          int64_t chunk_numel, const OptionalTensor& rounding,
                          int64_t first_noise) {
  const char* op = "qshard::quantize_gradients";
  const MessageLayout layout = layout_of(op, format, chunk_numel);
  TORCH_CHECK(chunks >= 0 && values.numel() <= chunks * chunk_numel,
              fmt::format("{}: {} values do not fit {} messages of {}", op, values.numel(), chunks,
                          chunk_numel));
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
  const char* op = "qshard::sum_gradients";
  const MessageLayout layout = layout_of(op, format, chunk_numel);
  TORCH_CHECK(messages.scalar_type() == at::kByte && messages.dim() == 3 &&
                  messages.size(2) == layout.bytes() && messages.is_contiguous(),
              op, ": expected contiguous uint8 messages of shape (chunks, peers, ", layout.bytes(),
              "), got ", messages.sizes(), " of ", messages.scalar_type());
  TORCH_CHECK(messages.size(1) >= 1, op, ": nobody sent anything: messages of shape ",
              messages.sizes());
  TORCH_CHECK(out.is_contiguous() && out.device() == messages.device() &&
                  out.numel() <= messages.size(0) * chunk_numel,
              op, ": out must be contiguous, on ", messages.device(), ", of at most ",
              messages.size(0) * chunk_numel, " values, got ", out.sizes(), " on ", out.device());
  SumMessagesTask task;
  task.layout = layout;
  task.chunks = messages.size(0);
  task.peers = messages.size(1);
  task.messages = messages.const_data_ptr<uint8_t>();
  TORCH_CHECK(reinterpret_cast<uintptr_t>(task.messages) % 16 == 0, op,
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
  const MessageLayout layout = layout_of("qshard::quantize_gradients", format, chunk_numel);
  return at::empty({chunks, layout.bytes()}, values.options().dtype(at::kByte));
}

void sum_gradients_meta(const Tensor&, c10::string_view, int64_t, const Tensor&, double) {}

}  // namespace qshard
