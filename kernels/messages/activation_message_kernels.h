// Launchers behind kernels/messages/activation_message.h.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/messages/activation_message.h"

namespace qshard::cuda {

cudaError_t launch_encode_activation(const EncodeActivationTask& task, cudaStream_t stream);
cudaError_t launch_decode_activations(const DecodeActivationsTask& task, cudaStream_t stream);

}  // namespace qshard::cuda
