// Launchers of the kernels behind kernels/messages/gradient_message.h.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/messages/gradient_message.h"

namespace qshard::cuda {

cudaError_t launch_encode_messages(const EncodeMessagesTask& task, cudaStream_t stream);
cudaError_t launch_sum_messages(const SumMessagesTask& task, cudaStream_t stream);

/// The launchers above call these for messages with tile scales.
cudaError_t launch_encode_nvfp4_messages(const EncodeMessagesTask& task, cudaStream_t stream);
cudaError_t launch_sum_nvfp4_messages(const SumMessagesTask& task, cudaStream_t stream);

}  // namespace qshard::cuda
