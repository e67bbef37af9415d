// The amaxes that ranks agree on where scales are row-local: of each matrix (NVFP4), and of each
// block in the block rows that a shard boundary cuts. Float bits, so that NaN wins.
#include "kernels/cuda/row_scaled_tile.cuh"

namespace qshard::cuda {
namespace {

__device__ __forceinline__ void raise(float* amax, uint32_t bits) {
  atomicMax(reinterpret_cast<unsigned int*>(amax), canonical_amax(bits));
}

template <int kBlockCols, typename Value>
__global__ void __launch_bounds__(kRowScaledThreads)
    amax(const __grid_constant__ RowScaledBatch batch) {
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
    // These rows lie in one block row: cut ones have 16 or 32 rows.
    const int row = max(first, 0);
    const int entry = row < first + kRowsPerWarp ? cut_entry(task, row) : -1;
    if (entry >= 0) {
      const uint32_t of_block = max_over_lanes<Row::kLanes>(of_rows);
      if (lane % Row::kLanes == 0 && col < task.cols) {
        raise(task.amax + entry + col / kBlockCols, of_block);
      }
    }
  }
  if (task.grid_numel == 0) return;

  __shared__ uint32_t of_warp[kRowScaledWarps];
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) of_warp[warp] = largest;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kRowScaledWarps; ++i) largest = max(largest, of_warp[i]);
    raise(task.amax + tile.matrix, largest);
  }
}

}  // namespace

int amax_blocks(const RowScaledTask& task) { return tile_count(task); }

cudaError_t launch_amax(const RowScaledBatch& batch, const Format& format, DType value_dtype,
                        cudaStream_t stream) {
  return with_row_scaled_types(format, value_dtype, [&](auto kind, auto value) {
    return launch_batch<kRowScaledThreads>(amax<decltype(kind)::kBlockCols, decltype(value)>, batch,
                                           stream);
  });
}

}  // namespace qshard::cuda
