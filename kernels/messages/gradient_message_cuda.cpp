#include "kernels/messages/gradient_message_cuda.h"

#include "kernels/device/check_launch.h"
#include "kernels/messages/gradient_message_kernels.h"

namespace qshard::cuda {

void encode_messages(const EncodeMessagesTask& task, void* stream) {
  check_launch(launch_encode_messages(task, static_cast<cudaStream_t>(stream)));
}

void sum_messages(const SumMessagesTask& task, void* stream) {
  check_launch(launch_sum_messages(task, static_cast<cudaStream_t>(stream)));
}

}  // namespace qshard::cuda
