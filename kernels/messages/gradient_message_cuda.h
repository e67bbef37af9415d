// kernels/messages/gradient_message.h on CUDA: launches on a cudaStream_t. Sizes are checked and
// not zero.
#pragma once

#include "kernels/messages/gradient_message.h"

namespace qshard::cuda {

void encode_messages(const EncodeMessagesTask& task, void* stream);
void sum_messages(const SumMessagesTask& task, void* stream);

}  // namespace qshard::cuda
