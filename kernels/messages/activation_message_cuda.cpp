#include "kernels/messages/activation_message_cuda.h"

#include "kernels/device/check_launch.h"
#include "kernels/messages/activation_message_kernels.h"

namespace qshard::cuda {

void encode_activation(const EncodeActivationTask& task, void* stream) {
  check_launch(launch_encode_activation(task, static_cast<cudaStream_t>(stream)));
}

void decode_activations(const DecodeActivationsTask& task, void* stream) {
  check_launch(launch_decode_activations(task, static_cast<cudaStream_t>(stream)));
}

}  // namespace qshard::cuda
