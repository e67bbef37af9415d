// Block scales in the order that cuBLASLt takes with MXFP8 and NVFP4 codes: tiles of 128 rows x 4
// scales, each 512 bytes. Made when an operand is handed over, never stored or sent.
#pragma once

#include <cstdint>

#include "kernels/format/layout.h"
#include "kernels/numerics/float8.h"
#ifdef QSHARD_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace qshard::cuda {

constexpr int64_t kScaleTileRows = 128;
constexpr int64_t kScaleTileCols = 4;
constexpr int64_t kScaleTileBytes = kScaleTileRows * kScaleTileCols;

/// Bytes for `rows` rows of `scales` scales each: both are padded to whole tiles.
constexpr int64_t swizzled_scale_bytes(int64_t rows, int64_t scales) {
  return ceil_div(rows, kScaleTileRows) * ceil_div(scales, kScaleTileCols) * kScaleTileBytes;
}

/// Byte of scale j of row i, where a row has `tile_cols` = ceil(scales / 4) tiles: within a tile
/// rows lie 32 apart, four of them side by side.
QSHARD_HOST_DEVICE int64_t swizzled_scale_index(int64_t i, int64_t j, int64_t tile_cols) {
  return (i / kScaleTileRows * tile_cols + j / kScaleTileCols) * kScaleTileBytes + i % 32 * 16 +
         i % kScaleTileRows / 32 * 4 + j % kScaleTileCols;
}

#ifdef QSHARD_WITH_CUDA
/// Scales that lie in rows of `row_bytes` bytes, 16-byte aligned and zero up to a multiple of 16,
/// as in a row image.
struct ScaleRows {
  const uint8_t* first = nullptr;  // of row 0
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t scales = 0;  // per row
};

/// Writes all swizzled_scale_bytes(rows, scales) of `out`, 16-byte aligned; padding becomes zero.
cudaError_t launch_swizzle_scales(const ScaleRows& in, uint8_t* out, cudaStream_t stream);
#endif

}  // namespace qshard::cuda
