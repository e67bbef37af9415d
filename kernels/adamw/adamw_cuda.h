// The CUDA side of kernels/adamw/adamw.h. `stream` is a cudaStream_t; nothing synchronises.
#pragma once

#include <span>

#include "kernels/adamw/adamw.h"

namespace qshard::cuda {

void fused_adamw(std::span<const AdamWTask> tasks, const AdamWOptions& options, void* stream);

}  // namespace qshard::cuda
