// CUDA kernels behind kernels/quantize.h. `stream` is a cudaStream_t; nothing synchronises.
#pragma once

#include <span>

#include "kernels/quantize.h"

namespace qshard::cuda {

void compute_amax(std::span<const QuantizeTask> tasks, void* stream);
void quantize(std::span<const QuantizeTask> tasks, void* stream);
void dequantize(std::span<const DequantizeTask> tasks, void* stream);

}  // namespace qshard::cuda
