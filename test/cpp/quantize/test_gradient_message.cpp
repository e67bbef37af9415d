// Messages that carry gradients (kernels/messages/gradient_message.h): what arrives, and CUDA
// against CPU at the edges of tiles, blocks and vectors. (Bits against the oracle:
// test/python/numerics/test_gradient_messages.py.)
#include <fmt/format.h>

#include "kernels/format/value_dtype.h"
#include "kernels/messages/gradient_message.h"
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {
namespace {

struct Case {
  int64_t chunk, chunks, numel;  // values of a message; messages; values there are
};
constexpr Case kCases[] = {{1, 1, 1},       {8, 3, 24},        {127, 2, 250},
                           {4096, 2, 8192}, {4097, 3, 12000},  {5003, 2, 10006},
                           {128, 4, 130},   {12288, 1, 12288}, {16, 2, 0}};
constexpr std::string_view kFormats[] = {"float8", "mxfp8", "nvfp4"};
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

MessageLayout layout_of(std::string_view format, const Case& c) {
  return {&find_message_format(format), c.chunk};
}

at::Tensor encoded(const at::Tensor& values, const MessageLayout& layout, int64_t chunks,
                   const at::Tensor& rounding = {}) {
  // What is not written shows.
  at::Tensor messages = at::full({chunks, layout.bytes()}, 0xa5, values.options().dtype(at::kByte));
  EncodeMessagesTask task;
  task.layout = layout;
  task.chunks = chunks;
  task.value_dtype = value_dtype(values.scalar_type());
  task.values = values.const_data_ptr();
  task.numel = values.numel();
  task.messages = messages.mutable_data_ptr<uint8_t>();
  task.rounding = rounding.defined() ? rounding.const_data_ptr<int32_t>() : nullptr;
  task.first_noise = 32;
  encode_messages(task, stream_of(values.device()));
  return messages;
}

at::Tensor summed(const at::Tensor& messages, const MessageLayout& layout, int64_t chunks,
                  int64_t numel, at::ScalarType dtype) {
  at::Tensor out = at::full({numel}, 7, messages.options().dtype(dtype));
  SumMessagesTask task;
  task.layout = layout;
  task.chunks = chunks;
  task.peers = messages.size(0) / chunks;
  task.messages = messages.const_data_ptr<uint8_t>();
  task.factor = 0.3f;
  task.value_dtype = value_dtype(dtype);
  task.values = out.mutable_data_ptr();
  task.numel = numel;
  sum_messages(task, stream_of(messages.device()));
  return out;
}

at::Tensor gradients(int64_t numel, at::ScalarType dtype) {
  at::Tensor x = at::randn({numel}) * at::exp2(at::randint(-20, 4, {numel}).to(at::kFloat));
  if (numel > 100) {
    x.narrow(0, 40, 30).zero_();
    x[80] = INFINITY;
    x[99] = -NAN;
  }
  return x.to(dtype);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto type = a.element_size() == 4 ? at::kInt : at::kShort;
  return at::equal(a.view(type), b.view(type));
}

TEST(GradientMessage, ArrivesWithinItsFormatsError) {
  for (const auto format : kFormats) {
    const Case c = {5003, 2, 10006};
    const MessageLayout layout = layout_of(format, c);
    const at::Tensor x = at::randn({c.numel});
    const at::Tensor messages = encoded(x, layout, c.chunks);
    const at::Tensor got = summed(messages, layout, c.chunks, c.numel, at::kFloat) / 0.3;
    const auto error = ((got - x).norm() / x.norm()).item<double>();
    EXPECT_LT(error, format == "nvfp4" ? 0.11 : 0.03) << format;
  }
}

TEST(GradientMessage, UnknownFormatsAreNamed) {
  EXPECT_THROW(find_message_format("float8_tensorwise"), c10::ValueError);
}

// With one device only: whether the CPU stays in its memory, for the sanitizers.
TEST(GradientMessage, EveryDeviceMakesTheBitsOfTheCpu) {
  const at::Device last = devices().back();
  const at::Tensor rounding = at::tensor({17, 4, 9}, at::kInt);
  for (const auto format : kFormats) {
    for (const auto dtype : kTypes) {
      for (const Case& c : kCases) {
        for (const int64_t offset : {0, 1}) {  // an address that no vector begins at
          const std::string where = fmt::format("{} {} x {} of {}, offset {}", format, c.chunks,
                                                c.chunk, c.numel, offset);
          const MessageLayout layout = layout_of(format, c);
          const at::Tensor x = gradients(c.numel + offset, dtype);
          const at::Tensor here = x.narrow(0, offset, c.numel);
          const at::Tensor there = x.to(last).narrow(0, offset, c.numel);
          const at::Tensor messages = encoded(here, layout, c.chunks);
          EXPECT_TRUE(at::equal(encoded(there, layout, c.chunks).cpu(), messages)) << where;
          EXPECT_TRUE(at::equal(encoded(there, layout, c.chunks, rounding.to(last)).cpu(),
                                encoded(here, layout, c.chunks, rounding)))
              << where << ", stochastic";
          // The same bytes as messages of several peers, and of several chunks.
          for (const int64_t chunks : {int64_t{1}, c.chunks}) {
            const int64_t numel = std::min(c.numel, chunks * c.chunk);
            EXPECT_TRUE(same_bits(summed(messages.to(last), layout, chunks, numel, dtype).cpu(),
                                  summed(messages, layout, chunks, numel, dtype)))
                << where << ", sum of " << chunks;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace qshard::testing
