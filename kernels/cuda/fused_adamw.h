// The CUDA side of kernels/optimizer.h. `stream` is a cudaStream_t; nothing synchronises.
#pragma once

#include <span>

#include "kernels/optimizer.h"

namespace qshard::cuda {

void fused_adamw(std::span<const AdamWTask> tasks, const AdamWOptions& options, void* stream);

}  // namespace qshard::cuda
