// Launchers of the kernels that make codes of normalized rows while the values are in registers.
// They sum and round as the kernel that stores the values does, so codes are those of what it
// leaves in memory.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/activation/kernels.h"
#include "kernels/norm/kernels.h"

namespace qshard::cuda {

/// Writes the statistics of a forward task's rows; raises `amax` (1), unless it is null, to the
/// largest |y|.
cudaError_t launch_norm_statistics(const NormTask& task, float* amax, cudaStream_t stream);

/// E4M3 codes of y, by statistics that are there; m and k of `out` are the rows and columns.
/// `amax`: one scale, from it; null: in blocks.
cudaError_t launch_norm_quantize(const NormTask& task, const ActivationTask& out, const float* amax,
                                 cudaStream_t stream);

/// Whether the kernel below makes what is asked for: rowwise codes alone, of rows of several
/// blocks.
bool can_quantize_norm_rows(const NormTask& task, const ActivationTask& out);

/// Codes in blocks of 1x128 along rows, and the statistics, at once.
cudaError_t launch_norm_quantize_rows(const NormTask& task, const ActivationTask& out,
                                      cudaStream_t stream);

}  // namespace qshard::cuda
