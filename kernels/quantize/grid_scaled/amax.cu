// Largest |x| of each scale block, as float bits: an integer maximum, so that NaN wins.
#include "kernels/device/amax.cuh"
#include "kernels/quantize/grid_scaled/tile.cuh"

namespace qshard::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) amax_reset(const __grid_constant__ AmaxBatch batch) {
  int block = static_cast<int>(blockIdx.x);
  const AmaxTask& task = find_task(batch, block);
  const int i = block * kThreads + static_cast<int>(threadIdx.x);
  if (i < task.numel) task.amax[i] = i < task.known_numel ? task.known[i] : 0.f;
}

template <typename Value, typename Batch>
__global__ void __launch_bounds__(kThreads) amax(const __grid_constant__ Batch batch) {
  int block = static_cast<int>(blockIdx.x);
  const GridScaledTask& task = find_task(batch, block);
  const Tile tile = find_tile(task, block);

  const ThreadRows<Value> rows(tile);
  Vector<Value> x[ThreadRows<Value>::kRows];
  load_vectors(task, tile, rows, 0, x);
  const uint32_t largest = max_of_block<kThreads>(largest_of<Value, ThreadRows<Value>::kRows>(x));
  if (threadIdx.x == 0) raise(task.amax + tile.grid_index, largest);
}

template <typename Batch>
cudaError_t launch(const Batch& batch, DType value_dtype, cudaStream_t stream) {
  return with_value_type(value_dtype, [&](auto value) {
    return launch_batch<kThreads>(amax<decltype(value), Batch>, batch, stream);
  });
}

}  // namespace

int amax_reset_blocks(const AmaxTask& task) { return (task.numel + kThreads - 1) / kThreads; }

int amax_blocks(const GridScaledTask& task) { return task.live_tile_rows * task.tile_cols; }

cudaError_t launch_amax_reset(const AmaxBatch& batch, cudaStream_t stream) {
  return launch_batch<kThreads>(amax_reset, batch, stream);
}

cudaError_t launch_amax(const GridScaledBatch& batch, DType value_dtype, cudaStream_t stream) {
  return launch(batch, value_dtype, stream);
}

cudaError_t launch_amax(const GridScaledFlushBatch& batch, DType value_dtype, cudaStream_t stream) {
  return launch(batch, value_dtype, stream);
}

}  // namespace qshard::cuda
