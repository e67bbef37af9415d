// Launcher of the kernel that swizzles block scales.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/gemm/swizzle_scales.h"

namespace qshard::cuda {

/// Scales that lie in rows of `row_bytes` bytes, 16-byte aligned and zero up to a multiple of 16,
/// as in a row image.
struct ScaleRows {
  const uint8_t* first = nullptr;  // where row 0 has its scales
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t scales = 0;  // per row
};

/// Writes all swizzled_scale_bytes(rows, scales) of `out`, 16-byte aligned; padding becomes zero.
cudaError_t launch_swizzle_scales(const ScaleRows& in, uint8_t* out, cudaStream_t stream);

}  // namespace qshard::cuda
