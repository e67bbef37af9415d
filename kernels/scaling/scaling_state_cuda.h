// kernels/scaling/scaling_state.h on CUDA: launches on a cudaStream_t.
#pragma once

#include "kernels/scaling/scaling_state.h"

namespace qshard::cuda {

void collect_state(std::span<const StateTask> tasks, void* stream);
void apply_state(std::span<const StateTask> tasks, FlushKind kind, const float* found_inf,
                 void* stream);
void delay_amax(float* amax, const DelayedAmax& delayed, void* stream);

}  // namespace qshard::cuda
