// kernels/messages/activation_message.h on CUDA: launches on a cudaStream_t.
#pragma once

#include "kernels/messages/activation_message.h"

namespace qshard::cuda {

void encode_activation(const EncodeActivationTask& task, void* stream);
void decode_activations(const DecodeActivationsTask& task, void* stream);

}  // namespace qshard::cuda
