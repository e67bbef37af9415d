// Launcher of the rotary embedding's kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/format/formats.h"

namespace qshard::cuda {

/// Rows of channels, in four dimensions; strides in elements.
struct RotaryTask {
  static constexpr int kDims = 4;
  const void* values = nullptr;
  void* out = nullptr;
  const float* cos = nullptr;  // (positions or more, rotated), of one or of all sequences
  const float* sin = nullptr;
  uint32_t size[kDims] = {};  // the last one runs fastest over the threads
  int64_t stride[kDims] = {};
  int64_t out_stride[kDims] = {};
  int64_t table_stride[kDims] = {};  // 0 of those that share angles
  int channels = 0;
  int rotated = 0;  // of them, even
  bool inverse = false;
};

/// `at_once`: 1, 2 or 4 values, or 16 bytes of them. Rows and tables begin at multiples of as many,
/// and as many hold pairs, or a half of pairs, alone.
cudaError_t launch_rotary(const RotaryTask& task, DType dtype, bool interleaved, int at_once,
                          cudaStream_t stream);

}  // namespace qshard::cuda
