// Row images with row-local scales from values.
//
// The first CUDA blocks of a task each quantize one tile, keeping its values in registers between
// finding the blocks' amaxes and encoding; the next zero the rows outside the logical tensor, the
// last write the grid.
#include "kernels/quantize/row_scaled/quantize.cuh"

namespace qshard::cuda {
namespace {

template <typename Kind, typename Value, typename Batch>
__global__ void __launch_bounds__(kRowScaledThreads) quantize(const __grid_constant__ Batch batch) {
  using Row = TileRow<Value, Kind::kBlockCols>;
  int block = static_cast<int>(blockIdx.x);
  const auto& task = find_task(batch, block);
  const int tiles = tile_count(task);
  if (block >= tiles) {
    write_rest(task, block - tiles, nvfp4_range(Kind::kFourOverSix));
    return;
  }
  const RowScaledTile tile = find_tile<kCodeTileRows>(task, block);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int col = tile.tile_col * Row::kCols + lane * Row::kSize;
  Vector<Value> x[kRowsPerWarp];
  load_rows(task, tile, tile.origin + warp * kRowsPerWarp, col, x);
  quantize_tile<Kind>(task, tile, col, x);
}

template <typename Batch>
cudaError_t launch(const Batch& batch, const Format& format, DType value_dtype,
                   cudaStream_t stream) {
  return with_row_scaled_types(format, value_dtype, [&](auto kind, auto value) {
    return launch_batch<kRowScaledThreads>(quantize<decltype(kind), decltype(value), Batch>, batch,
                                           stream);
  });
}

}  // namespace

bool has_row_scaled_kernels(const Format& format) {
  return with_row_scaled_types(format, DType::kFloat32, [](auto, auto) { return cudaSuccess; }) ==
         cudaSuccess;
}

int quantize_blocks(const RowScaledTask& task) {
  return tile_count(task) + zero_blocks(task) +
         (task.grid_numel + kRowScaledThreads - 1) / kRowScaledThreads;
}

cudaError_t launch_quantize(const RowScaledFlushBatch& batch, const Format& format,
                            DType value_dtype, cudaStream_t stream) {
  return launch(batch, format, value_dtype, stream);
}

cudaError_t launch_quantize(const StochasticRowScaledBatch& batch, const Format& format,
                            DType value_dtype, cudaStream_t stream) {
  return launch(batch, format, value_dtype, stream);
}

}  // namespace qshard::cuda
