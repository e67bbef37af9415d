#include "kernels/messages/gradient_message.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/format/shown_name.h"
#include "kernels/messages/gradient_message_cpu.h"
#ifdef QSHARD_WITH_CUDA
#include <c10/cuda/CUDAException.h>

#include "kernels/messages/gradient_message_kernels.h"
#endif

namespace qshard {
namespace {

constexpr std::array<MessageFormat, 3> kMessageFormats = {{
    {"float8", DType::kFloat8E4M3, 8, 128, RowScale::kE8M0},
    {"mxfp8", DType::kFloat8E4M3, 8, 32, RowScale::kE8M0},
    {"nvfp4", DType::kFloat4E2M1, 4, 16, RowScale::kE4M3},
}};

#ifndef QSHARD_WITH_CUDA
[[noreturn]] void no_cuda() {
  TORCH_CHECK(
      false,
      "qshard: cannot quantize gradients on CUDA: this library was built without CUDA (nvcc "
      "was not found)");
}
#endif

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
#ifdef QSHARD_WITH_CUDA
  C10_CUDA_CHECK(cuda::launch_encode_messages(task, static_cast<cudaStream_t>(stream.handle)));
#else
  no_cuda();
#endif
}

void sum_messages(const SumMessagesTask& task, Stream stream) {
  check_chunks(task.chunks);
  if (task.numel == 0 || task.layout.numel == 0) return;
  if (!stream.is_cuda) return cpu::sum_messages(task);
#ifdef QSHARD_WITH_CUDA
  C10_CUDA_CHECK(cuda::launch_sum_messages(task, static_cast<cudaStream_t>(stream.handle)));
#else
  no_cuda();
#endif
}

}  // namespace qshard
