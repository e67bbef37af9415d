#include "kernels/messages/gradient_message.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/format/shown_name.h"
#include "kernels/messages/gradient_message_cpu.h"
#include "kernels/messages/gradient_message_cuda.h"

namespace qshard {
namespace {

constexpr std::array<MessageFormat, 3> kMessageFormats = {{
    {"float8", DType::kFloat8E4M3, 8, 128, RowScale::kE8M0, false},
    {"mxfp8", DType::kFloat8E4M3, 8, 32, RowScale::kE8M0, false},
    {"nvfp4", DType::kFloat4E2M1, 4, 16, RowScale::kE4M3, true},
}};

// CUDA's grids have no more rows.
constexpr int64_t kMaxChunks = 65535;

void check_chunks(int64_t chunks) {
  TORCH_CHECK(chunks <= kMaxChunks, fmt::format("qshard: {} messages of gradients at once; at most "
                                                "{} can be made or summed",
                                                chunks, kMaxChunks));
}

}  // namespace

const MessageFormat& find_message_format(std::string_view name) {
  const auto* found = std::find_if(kMessageFormats.begin(), kMessageFormats.end(),
                                   [&](const MessageFormat& f) { return f.name == name; });
  TORCH_CHECK_VALUE(found != kMessageFormats.end(),
                    fmt::format("qshard: gradients do not travel as '{}'; known are float8, mxfp8, "
                                "nvfp4",
                                shown_name(name)));
  return *found;
}

void encode_messages(const EncodeMessagesTask& task, Stream stream) {
  check_chunks(task.chunks);
  if (task.chunks == 0 || task.layout.numel == 0) return;
  if (!stream.is_cuda) return cpu::encode_messages(task);
  cuda::encode_messages(task, stream.handle);
}

void sum_messages(const SumMessagesTask& task, Stream stream) {
  check_chunks(task.chunks);
  if (task.numel == 0 || task.layout.numel == 0) return;
  if (!stream.is_cuda) return cpu::sum_messages(task);
  cuda::sum_messages(task, stream.handle);
}

}  // namespace qshard
