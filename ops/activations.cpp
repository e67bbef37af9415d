#include "ops/activations.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "kernels/activation_message.h"
#include "kernels/current_stream.h"
#include "kernels/linear_amax.h"
#include "kernels/value_dtype.h"

namespace qshard {
namespace {

ActivationMessage message_of(const char* op, c10::string_view format_name, bool is_gradient,
                             at::IntArrayRef size) {
  const Format& format = checked_format(format_name, op);
  TORCH_CHECK(format.scales_in_grid() && size.size() >= 2,
              fmt::format("{}: needs a format of FP8 with scales in the grid and tokens (..., K), "
                          "got {} and {}",
                          op, format.name, size));
  return {format, is_gradient ? PackedRole::kGradient : PackedRole::kInput,
          c10::multiply_integers(size.slice(0, size.size() - 1)), size.back()};
}

}  // namespace

Tensor message_amax(const Tensor& self, c10::string_view format) {
  const auto message = message_of("qshard::_message_amax", format, false, self.sizes());
  if (!message.has_one_scale) return at::empty({0}, self.options().dtype(at::kFloat));
  const c10::OptionalDeviceGuard guard(self.device());
  return activation_amax(self.reshape({message.rows, message.cols}));
}

Tensor encode_activation_op(const Tensor& self, c10::string_view format, bool is_gradient,
                            const Tensor& amax) {
  const char* op = "qshard::_encode_activation";
  EncodeActivationTask task{message_of(op, format, is_gradient, self.sizes())};
  TORCH_CHECK(!task.message.has_one_scale || (amax.numel() == 1 && amax.device() == self.device()),
              op, ": needs the amax of all ranks on ", self.device(), ", got ", amax.sizes(),
              " on ", amax.device());
  const Tensor values = self.contiguous();
  task.values = values.const_data_ptr();
  task.value_dtype = value_dtype(values.scalar_type());
  if (task.message.has_one_scale) task.amax = amax.const_data_ptr<float>();
  const c10::OptionalDeviceGuard guard(self.device());
  const Tensor out = at::empty({task.message.bytes()}, self.options().dtype(at::kByte));
  task.bytes = out.mutable_data_ptr<uint8_t>();
  encode_activation(task, current_stream(self.device()));
  return out;
}

Tensor decode_activations_op(const Tensor& messages, c10::string_view format, bool is_gradient,
                             at::IntArrayRef size, int64_t dim, at::ScalarType dtype) {
  const char* op = "qshard::_decode_activations";
  DecodeActivationsTask task{message_of(op, format, is_gradient, size)};
  const auto last = static_cast<int64_t>(size.size()) - 1;
  const int64_t bytes = task.message.bytes();
  TORCH_CHECK(dim >= 0 && dim < last && messages.scalar_type() == at::kByte &&
                  messages.is_contiguous() && bytes > 0 && messages.numel() % bytes == 0 &&
                  reinterpret_cast<uintptr_t>(messages.const_data_ptr()) % 16 == 0,
              fmt::format("{}: needs contiguous uint8 messages of {} bytes of tokens {}, to be put "
                          "together along one of their first {} dimensions, got {} bytes and {}",
                          op, bytes, size, last, messages.numel(), dim));
  task.messages = messages.const_data_ptr<uint8_t>();
  task.ranks = messages.numel() / bytes;
  task.inner = c10::multiply_integers(size.slice(dim, last - dim));
  auto whole = size.vec();
  whole[dim] *= task.ranks;
  const c10::OptionalDeviceGuard guard(messages.device());
  Tensor out = at::empty(whole, messages.options().dtype(dtype));
  task.values = out.mutable_data_ptr();
  task.value_dtype = value_dtype(dtype);
  decode_activations(task, current_stream(messages.device()));
  return out;
}

}  // namespace qshard
