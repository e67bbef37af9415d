// The part of quantize_cuda.h for columnwise row images, and for rowwise ones that are quantized
// with them; other tasks are skipped.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/format/quantize_tasks.h"

namespace qshard::cuda {

/// `amax` must be zero before.
void compute_amax_columnwise(std::span<const QuantizeTask> tasks, cudaStream_t stream);
void quantize_columnwise(std::span<const QuantizeTask> tasks, cudaStream_t stream);
void dequantize_columnwise(std::span<const DequantizeTask> tasks, cudaStream_t stream);

}  // namespace qshard::cuda
