// Row-local scales of a row image in cuBLASLt's order: a warp copies 128 rows x 16 scales.
#include "kernels/gemm/swizzle_scales_kernel.h"

namespace qshard::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLoadBytes = 16;
constexpr int kTilesPerLoad = kLoadBytes / static_cast<int>(kScaleTileCols);

__global__ void __launch_bounds__(kThreads)
    swizzle_scales(const ScaleRows in, uint8_t* out, int64_t tile_cols, int64_t groups) {
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t group = warp % groups;
  const int64_t row = warp / groups * kScaleTileRows + threadIdx.x % 32;
  if (row - threadIdx.x % 32 >= in.rows) return;
  // Word t of row k is word k of this lane's 16 bytes in tile t.
  uint4 scales[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    scales[k] = make_uint4(0, 0, 0, 0);
    if (row + 32 * k < in.rows) {
      const uint8_t* from = in.first + (row + 32 * k) * in.row_bytes + group * kLoadBytes;
      scales[k] = __ldg(reinterpret_cast<const uint4*>(from));
    }
  }
  const int64_t tile = group * kTilesPerLoad;
  auto* to =
      reinterpret_cast<uint4*>(out + swizzled_scale_index(row, tile * kScaleTileCols, tile_cols));
  constexpr int64_t kTile = kScaleTileBytes / kLoadBytes;
  to[0] = make_uint4(scales[0].x, scales[1].x, scales[2].x, scales[3].x);
  if (tile + 1 < tile_cols) {
    to[kTile] = make_uint4(scales[0].y, scales[1].y, scales[2].y, scales[3].y);
  }
  if (tile + 2 < tile_cols) {
    to[2 * kTile] = make_uint4(scales[0].z, scales[1].z, scales[2].z, scales[3].z);
  }
  if (tile + 3 < tile_cols) {
    to[3 * kTile] = make_uint4(scales[0].w, scales[1].w, scales[2].w, scales[3].w);
  }
}

}  // namespace

cudaError_t launch_swizzle_scales(const ScaleRows& in, uint8_t* out, cudaStream_t stream) {
  const int64_t groups = ceil_div(in.scales, kLoadBytes);
  const int64_t warps = ceil_div(in.rows, kScaleTileRows) * groups;
  if (warps == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(ceil_div(warps, kThreads / 32));
  swizzle_scales<<<blocks, kThreads, 0, stream>>>(in, out, ceil_div(in.scales, kScaleTileCols),
                                                  groups);
  return cudaGetLastError();
}

}  // namespace qshard::cuda
