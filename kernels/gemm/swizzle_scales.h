// Block scales in the order that cuBLASLt takes with MXFP8 and NVFP4 codes: tiles of 128 rows x 4
// scales, each 512 bytes. Made when an operand is handed over, never stored or sent.
#pragma once

#include <cstdint>

#include "kernels/format/layout.h"
#include "kernels/numerics/float8.h"

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

}  // namespace qshard::cuda
