// The amaxes that ranks agree on where scales are row-local: of each matrix (NVFP4), and of each
// block in the block rows that a shard boundary cuts. Float bits, so that NaN wins.
#include "kernels/quantize/row_scaled/tile.cuh"

namespace qshard::cuda {
namespace {

template <int kBlockCols, typename Value>
__global__ void __launch_bounds__(kRowScaledThreads)
    amax(const __grid_constant__ RowScaledFlushBatch batch) {
  using Row = TileRow<Value, kBlockCols>;
  int block = static_cast<int>(blockIdx.x);
  const RowScaledTask& task = find_task(batch, block);
  const RowScaledTile tile = find_tile<kAmaxTileRows>(task, block);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int col = tile.tile_col * Row::kCols + lane * Row::kSize;

  uint32_t largest = 0;
#pragma unroll 1
  for (int first = tile.origin + warp * kRowsPerWarp; first < tile.row_end;
       first += kCodeTileRows) {
    Vector<Value> x[kRowsPerWarp];
    load_rows(task, tile, first, col, x);
    const uint32_t of_rows = largest_of<Value, kRowsPerWarp>(x);
    largest = max(largest, of_rows);
    raise_boundary_amax<kBlockCols, Value>(task, first, col, of_rows);
  }
  if (task.grid_numel > 0) raise_matrix_amax(task, tile, largest);
}

}  // namespace

int amax_blocks(const RowScaledTask& task) { return tile_count(task); }

cudaError_t launch_amax(const RowScaledFlushBatch& batch, const Format& format, DType value_dtype,
                        cudaStream_t stream) {
  return with_row_scaled_types(format, value_dtype, [&](auto kind, auto value) {
    constexpr int kBlockCols = decltype(kind)::kBlockCols;
    if constexpr (kBlockCols == 0) {
      return cudaErrorInvalidValue;  // nothing is agreed on
    } else {
      return launch_batch<kRowScaledThreads>(amax<kBlockCols, decltype(value)>, batch, stream);
    }
  });
}

}  // namespace qshard::cuda
