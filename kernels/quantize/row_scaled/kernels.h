// Launchers of the kernels between values and row images that hold their blocks' scales; many
// shards per launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/device/task_batch.h"
#include "kernels/format/formats.h"

namespace qshard::cuda {

constexpr int kRowScaledThreads = 128;
// Tiles are anchored, like the scale blocks, at row 0 of each matrix, and hold whole blocks.
constexpr int kCodeTileRows = 32;   // where values become codes or codes values
constexpr int kAmaxTileRows = 128;  // where values are only read
// A warp takes this much of a row of values at once.
constexpr int kTileRowBytes = 512;

/// One shard, or a window of its rows, as the kernels see it.
struct RowScaledTask {
  void* values;      // (rows, cols) contiguous
  uint8_t* image;    // row 0; the next one is row_bytes further
  float* amax;       // what ranks agree on: of matrices (NVFP4), then of boundary block rows
  float* grid;       // scale_inv of matrices (NVFP4)
  float* grid_copy;  // null, or a second place for them
  int rows;
  int live_rows;  // rows [0, live_rows) belong to the logical tensor
  int cols;
  int block_cols;
  int row_bytes;
  int image_row_bytes;  // of one image: fewer where rows hold two
  int row_scale_offset;
  int matrix_rows;  // > 0 where live_rows > 0
  int first_matrix;
  int matrix_begin;  // row where the first matrix begins: 0, or above the shard
  int first_tile;    // tile of row 0 in that matrix
  int tiles_per_matrix;
  int live_tile_rows;
  int tile_cols;
  int grid_numel;
  // Rows [0, first_boundary_end) and [last_boundary_begin, live_rows) are of blocks that other
  // ranks hold rows of too; first_boundary, last_boundary: the amax entry of column 0.
  int first_boundary_end;
  int first_boundary;
  int last_boundary_begin;
  int last_boundary;
  bool vectorized;  // rows of `values` are 16-byte aligned
};

/// One that is quantized with stochastic rounding.
struct StochasticRowScaledTask : RowScaledTask {
  const int32_t* rounding;  // QuantizeTask::rounding
  int64_t element;          // of the full tensor, that (0, 0) is (Layout::element)
  int64_t element_pitch;    // from row to row
};

using RowScaledBatch = TaskBatch<RowScaledTask, 33>;        // of what a linear needs
using RowScaledFlushBatch = TaskBatch<RowScaledTask, 256>;  // of the shards of a model
using StochasticRowScaledBatch = TaskBatch<StochasticRowScaledTask, 216>;
static_assert(sizeof(RowScaledFlushBatch) <= kMaxParameterBytes &&
              sizeof(StochasticRowScaledBatch) <= kMaxParameterBytes);

/// Whether the kernels know this format with row-local scales.
bool has_row_scaled_kernels(const Format& format);

// CUDA blocks that a task needs; its tiles have kCodeTileRows rows, for the amax kAmaxTileRows.
int amax_blocks(const RowScaledTask& task);
int quantize_blocks(const RowScaledTask& task);
int dequantize_blocks(const RowScaledTask& task);

// All tasks of a batch have one format and one value type.

/// Raises the amax entries to those of the values.
cudaError_t launch_amax(const RowScaledFlushBatch& batch, const Format& format, DType value_dtype,
                        cudaStream_t stream);
/// Writes image and grid from values and amax.
cudaError_t launch_quantize(const RowScaledFlushBatch& batch, const Format& format,
                            DType value_dtype, cudaStream_t stream);
cudaError_t launch_quantize(const StochasticRowScaledBatch& batch, const Format& format,
                            DType value_dtype, cudaStream_t stream);
/// Writes values from image and grid.
cudaError_t launch_dequantize(const RowScaledBatch& batch, const Format& format, DType value_dtype,
                              cudaStream_t stream);

}  // namespace qshard::cuda
