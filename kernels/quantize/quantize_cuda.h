// CUDA kernels behind kernels/quantize/quantize.h. `stream` is a cudaStream_t; nothing
// synchronises. A format with two row images has both written at once, and one is read:
// dequantizing takes the layout of one image.
#pragma once

#include <span>
#include <vector>

#include "kernels/quantize/quantize.h"

namespace qshard::cuda {

void compute_amax(std::span<const QuantizeTask> tasks, void* stream);
void quantize(std::span<const QuantizeTask> tasks, void* stream);
/// quantize_at_once() of the tasks whose scale blocks are tiles, all of them held. Returns the
/// others.
std::vector<QuantizeTask> quantize_tiles(std::span<const QuantizeTask> tasks, void* stream);
void dequantize(std::span<const DequantizeTask> tasks, void* stream);

}  // namespace qshard::cuda
