// The part of quantize_cuda.h for formats with row-local scales; tasks of other formats, and those
// with a columnwise image, are skipped.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/format/quantize_tasks.h"

namespace qshard::cuda {

/// `amax` must be zero before.
void compute_amax_row_scaled(std::span<const QuantizeTask> tasks, cudaStream_t stream);
void quantize_row_scaled(std::span<const QuantizeTask> tasks, cudaStream_t stream);
void dequantize_row_scaled(std::span<const DequantizeTask> tasks, cudaStream_t stream);

}  // namespace qshard::cuda
