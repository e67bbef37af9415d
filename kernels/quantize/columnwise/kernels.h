// Launchers of the kernels between values and columnwise row images: 32x1 blocks, each row of a
// block with a slice of their E8M0 scales; many shards per launch. They are quantized together with
// the rowwise images beside them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/format/formats.h"
#include "kernels/quantize/row_scaled/kernels.h"

namespace qshard::cuda {

constexpr int kColumnwiseThreads = 128;  // one column each
constexpr int kColumnRows = 32;          // of a scale block

/// One shard, or a window of its rows, as the kernels see it. Block row b of it holds the rows
/// [32 * b - first_in_block, 32 * (b + 1) - first_in_block).
struct ColumnwiseTask {
  void* values;    // (rows, cols) contiguous
  uint8_t* image;  // row 0; the next one is row_bytes further
  float* amax;     // entries for boundary blocks
  int rows;
  int live_rows;  // rows [0, live_rows) belong to the logical tensor
  int cols;
  int row_bytes;
  int row_scale_offset;
  int slice_bytes;  // scales in a row
  int first_in_block;
  int block_rows;  // that live rows are in
  int tile_cols;
  // The amax entry of column 0 of the first and of the last block row, -1 where no other rank holds
  // rows of it.
  int first_boundary;
  int last_boundary;
};

using ColumnwiseBatch = TaskBatch<ColumnwiseTask, 40>;        // of what a linear needs
using ColumnwiseFlushBatch = TaskBatch<ColumnwiseTask, 256>;  // of the shards of a model
static_assert(sizeof(ColumnwiseFlushBatch) <= kMaxParameterBytes);

// CUDA blocks that a task needs.
int columnwise_amax_blocks(const ColumnwiseTask& task);
int columnwise_dequantize_blocks(const ColumnwiseTask& task);

// All tasks of a batch have one value type.

/// Writes the amax entries of boundary blocks.
cudaError_t launch_columnwise_amax(const ColumnwiseFlushBatch& batch, DType value_dtype,
                                   cudaStream_t stream);
/// Writes the columnwise image from values and amax, and the rowwise one where rows hold both: of
/// tasks in tiles of kCodeTileRows rows, in quantize_blocks(task) CUDA blocks.
cudaError_t launch_quantize_both_images(const RowScaledFlushBatch& batch, DType value_dtype,
                                        cudaStream_t stream);
cudaError_t launch_quantize_both_images(const StochasticRowScaledBatch& batch, DType value_dtype,
                                        cudaStream_t stream);
/// Writes values from the image.
cudaError_t launch_columnwise_dequantize(const ColumnwiseBatch& batch, DType value_dtype,
                                         cudaStream_t stream);

}  // namespace qshard::cuda
