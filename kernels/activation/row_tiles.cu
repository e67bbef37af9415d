#include <cub/block/block_scan.cuh>

#include "kernels/activation/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kTileRows = 128;

struct Largest {
  __device__ int operator()(int a, int b) const { return max(a, b); }
};

/// The first of `count` ascending values that is above `value`.
__device__ int first_above(const int* values, int count, int value) {
  int low = 0;
  for (int high = count; low < high;) {
    const int middle = (low + high) / 2;
    if (values[middle] > value) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/// By one CUDA block: 1,024 groups at a time, one to a thread, then their tiles.
__global__ void __launch_bounds__(kThreads)
    find_row_tiles(const int32_t* offs, int groups, int total, RowTile* tiles, int count) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ int ends[kThreads];
  __shared__ int tile_ends[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  int row_before = 0;
  int tiles_before = 0;
  for (int first = 0; first < groups; first += kThreads) {
    const int group = first + thread;
    int end = group < groups ? min(offs[group], total) : 0;
    Scan(scan).InclusiveScan(max(end, row_before), end, Largest());
    ends[thread] = end;
    __syncthreads();
    const int start = thread == 0 ? row_before : ends[thread - 1];
    int tile_end = 0;
    Scan(scan).InclusiveSum((end - start + kTileRows - 1) / kTileRows, tile_end);
    tile_ends[thread] = tile_end + tiles_before;
    __syncthreads();
    const int held = min(groups - first, kThreads);
    const int last = tile_ends[held - 1];
    for (int index = tiles_before + thread; index < last; index += kThreads) {
      const int of = first_above(tile_ends, held, index);
      const int begin = of == 0 ? row_before : ends[of - 1];
      const int before = index - (of == 0 ? tiles_before : tile_ends[of - 1]);
      tiles[index] = {begin + before * kTileRows, ends[of], index * kTileRows, first + of};
    }
    row_before = ends[held - 1];
    tiles_before = last;
    __syncthreads();
  }
  for (int index = tiles_before + thread; index < count; index += kThreads) {
    tiles[index] = {-1, -1, 0, 0};
  }
}

}  // namespace

cudaError_t launch_row_tiles(const int32_t* offs, int64_t groups, int64_t total, RowTile* tiles,
                             int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  find_row_tiles<<<1, kThreads, 0, stream>>>(
      offs, static_cast<int>(groups), static_cast<int>(total), tiles, static_cast<int>(count));
  return cudaGetLastError();
}

}  // namespace qshard::cuda
