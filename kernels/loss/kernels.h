// Launchers of the kernels of cross entropy. The bits are those of kernels/loss/cross_entropy_cpu.h
// but for targets that are no words, whose losses and gradients are NaN here.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/activation/kernels.h"
#include "kernels/loss/cross_entropy_task.h"

namespace qshard::cuda {

/// Sets log_sums and losses.
cudaError_t launch_cross_entropy_losses(const CrossEntropyTask& task, DType dtype,
                                        cudaStream_t stream);
/// Sets totals.
cudaError_t launch_cross_entropy_totals(const CrossEntropyTask& task, cudaStream_t stream);

/// The gradients of each row's loss, in the dtype of the logits: values, (m, v).
cudaError_t launch_cross_entropy_gradient(const CrossEntropyTask& task, void* values, DType dtype,
                                          cudaStream_t stream);
/// The codes of those: by one scale, that of an amax of 1, which none exceeds, or in blocks, as
/// launch_quantize_activation_in_blocks scales them. The values of `out` are not read.
cudaError_t launch_cross_entropy_codes(const CrossEntropyTask& task, const ActivationTask& out,
                                       bool in_blocks, DType dtype, DType code_dtype,
                                       cudaStream_t stream);

}  // namespace qshard::cuda
