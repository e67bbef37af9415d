// Launchers of the kernels between values and row images; many shards per launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/device/task_batch.h"
#include "kernels/format/formats.h"

namespace qshard::cuda {

constexpr int kTileRows = 128;  // a tile never crosses a scale block
constexpr int kTileCols = 128;
constexpr int kThreads = 256;

/// One shard as the kernels see it. Its rows are covered by tile rows anchored, like the scale
/// blocks, at row 0 of each matrix; then come the rows outside the logical tensor.
struct GridScaledTask {
  void* values;                  // (rows, cols) contiguous
  uint8_t* image;                // (rows, row_bytes)
  float* amax;                   // (grid_rows, grid_cols)
  float* grid;                   // (grid_rows, grid_cols)
  float* grid_copy;              // null, or a second place for them
  float* speculative_scale_inv;  // QuantizeTask::speculative_scale_inv
  int64_t row_offset;            // logical row of row 0
  int64_t matrix_rows;           // rows per matrix, > 0 where live_rows > 0
  int64_t first_tile_row;        // tile row of row 0
  int rows;
  int live_rows;  // rows [0, live_rows) belong to the logical tensor
  int cols;
  int row_bytes;
  int tiles_per_matrix;  // tile rows per matrix
  int live_tile_rows;
  int tile_cols;
  int grid_numel;
  int grid_cols;
  float code_max;
  bool blockwise;  // one scale per tile; else one per matrix, or per row, which others launch
  bool power_of_two;
  bool vectorized;  // rows of `values` are 16-byte aligned
};

/// One that is quantized with stochastic rounding.
struct StochasticGridScaledTask : GridScaledTask {
  const int32_t* rounding;  // QuantizeTask::rounding
  int64_t element;          // of the full tensor, that (0, 0) is (Layout::element)
  int64_t element_pitch;    // from row to row
};

using GridScaledBatch = TaskBatch<GridScaledTask, 30>;        // for what a linear needs
using GridScaledFlushBatch = TaskBatch<GridScaledTask, 256>;  // for the shards of a model
using StochasticGridScaledBatch = TaskBatch<StochasticGridScaledTask, 216>;
static_assert(sizeof(GridScaledFlushBatch) <= kMaxParameterBytes &&
              sizeof(StochasticGridScaledBatch) <= kMaxParameterBytes);

/// The amaxes of one task of any format before its values are looked at.
struct AmaxTask {
  float* amax;         // (numel,)
  const float* known;  // (known_numel,)
  int numel;
  int known_numel;
};

using AmaxBatch = TaskBatch<AmaxTask, 256>;

int amax_reset_blocks(const AmaxTask& task);
int amax_blocks(const GridScaledTask& task);
int quantize_blocks(const GridScaledTask& task);
int quantize_tiles_blocks(const GridScaledTask& task);
int dequantize_blocks(const GridScaledTask& task);

/// Sets every amax entry to the known one, or 0.
cudaError_t launch_amax_reset(const AmaxBatch& batch, cudaStream_t stream);
/// Raises the amax entries to those of the values. All values of a batch have one type.
cudaError_t launch_amax(const GridScaledBatch& batch, DType value_dtype, cudaStream_t stream);
cudaError_t launch_amax(const GridScaledFlushBatch& batch, DType value_dtype, cudaStream_t stream);
/// Writes image and grid from values and amax.
cudaError_t launch_quantize(const GridScaledFlushBatch& batch, DType value_dtype,
                            cudaStream_t stream);
cudaError_t launch_quantize(const StochasticGridScaledBatch& batch, DType value_dtype,
                            cudaStream_t stream);
/// Writes image, grid and amax from values alone. Every tile is a scale block, all of them held.
cudaError_t launch_quantize_tiles(const GridScaledFlushBatch& batch, DType value_dtype,
                                  cudaStream_t stream);
/// Writes values from image and grid.
cudaError_t launch_dequantize(const GridScaledBatch& batch, DType value_dtype, cudaStream_t stream);

// The same of tasks with one scale per row; all tasks of a batch are such. As many CUDA blocks.

cudaError_t launch_amax_in_rows(const GridScaledBatch& batch, DType value_dtype,
                                cudaStream_t stream);
cudaError_t launch_amax_in_rows(const GridScaledFlushBatch& batch, DType value_dtype,
                                cudaStream_t stream);
cudaError_t launch_quantize_in_rows(const GridScaledFlushBatch& batch, DType value_dtype,
                                    cudaStream_t stream);
cudaError_t launch_quantize_in_rows(const StochasticGridScaledBatch& batch, DType value_dtype,
                                    cudaStream_t stream);
cudaError_t launch_dequantize_in_rows(const GridScaledBatch& batch, DType value_dtype,
                                      cudaStream_t stream);

}  // namespace qshard::cuda
