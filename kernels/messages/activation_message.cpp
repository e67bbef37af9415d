#include "kernels/messages/activation_message.h"

#include <c10/util/Exception.h>

#include "kernels/messages/activation_message_cpu.h"
#ifdef QSHARD_WITH_CUDA
#include "kernels/device/check_launch.h"
#include "kernels/messages/activation_message_kernels.h"
#endif

namespace qshard {
namespace {

#ifndef QSHARD_WITH_CUDA
[[noreturn]] void no_cuda() {
  TORCH_CHECK(
      false,
      "qshard: cannot gather activations on CUDA: this library was built without CUDA (nvcc "
      "was not found)");
}
#endif

}  // namespace

ActivationMessage::ActivationMessage(const Format& format, PackedRole role, int64_t rows,
                                     int64_t cols)
    : code_dtype(packed_code_dtype(format, role)),
      has_one_scale(packed_scale_mode(format) == ScaleMode::kTensor),
      power_of_two_scales(format.power_of_two_scales),
      rows(rows),
      cols(cols) {}

void encode_activation(const EncodeActivationTask& task, Stream stream) {
  if (!stream.is_cuda) return cpu::encode_activation(task);
#ifdef QSHARD_WITH_CUDA
  cuda::check_launch(
      cuda::launch_encode_activation(task, static_cast<cudaStream_t>(stream.handle)));
#else
  no_cuda();
#endif
}

void decode_activations(const DecodeActivationsTask& task, Stream stream) {
  if (!stream.is_cuda) return cpu::decode_activations(task);
#ifdef QSHARD_WITH_CUDA
  cuda::check_launch(
      cuda::launch_decode_activations(task, static_cast<cudaStream_t>(stream.handle)));
#else
  no_cuda();
#endif
}

}  // namespace qshard
