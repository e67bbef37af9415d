// Byte transpose of codes: 16-byte loads, 8-byte stores, 128x128 tiles through shared memory.
#include "kernels/activation/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kChunks = kTile / 8;

__global__ void __launch_bounds__(kThreads) transpose(const uint8_t* in, int64_t rows, int64_t cols,
                                                      int64_t ld_in, uint8_t* out, int64_t ld_out) {
  __shared__ uint2 transposed[kTile][kChunks];
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  // A thread transposes 8 rows x 8 columns.
  const int row = static_cast<int>(threadIdx.x) / kChunks * 8;
  const int col = static_cast<int>(threadIdx.x) % kChunks * 8;
  uint8_t bytes[8][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint2 v = make_uint2(0, 0);
    if (tile_row + row + i < rows && tile_col + col < cols) {
      v = __ldg(reinterpret_cast<const uint2*>(in + (tile_row + row + i) * ld_in + tile_col + col));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bytes[i][j] = static_cast<uint8_t>(v.x >> (8 * j));
      bytes[i][j + 4] = static_cast<uint8_t>(v.y >> (8 * j));
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32_t low = 0;
    uint32_t high = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low |= static_cast<uint32_t>(bytes[i][j]) << (8 * i);
      high |= static_cast<uint32_t>(bytes[i + 4][j]) << (8 * i);
    }
    transposed[col + j][(row / 8) ^ (col / 8)] = make_uint2(low, high);
  }
  __syncthreads();
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
#pragma unroll
  for (int pass = 0; pass < kTile * kChunks / kThreads; ++pass) {
    const int c = static_cast<int>(threadIdx.x) / kChunks + pass * (kThreads / kChunks);
    if (tile_col + c < cols && tile_row + chunk * 8 < rows) {
      *reinterpret_cast<uint2*>(out + (tile_col + c) * ld_out + tile_row + chunk * 8) =
          transposed[c][chunk ^ (c / 8)];
    }
  }
}

__global__ void gemm_block_scales(const float* grid, int row_blocks, int col_blocks,
                                  bool contract_rows, int outer, int inner, float* out) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= outer * inner) return;
  const int row = contract_rows ? i % inner : i / inner;
  const int col = contract_rows ? i / inner : i % inner;
  out[i] = row < row_blocks && col < col_blocks ? grid[row * col_blocks + col] : 0.f;
}

}  // namespace

cudaError_t launch_transpose_codes(const uint8_t* in, int64_t rows, int64_t cols, int64_t ld_in,
                                   uint8_t* out, int64_t ld_out, cudaStream_t stream) {
  if (rows == 0 || cols == 0) return cudaSuccess;
  const dim3 blocks(static_cast<unsigned>((cols + kTile - 1) / kTile),
                    static_cast<unsigned>((rows + kTile - 1) / kTile));
  transpose<<<blocks, kThreads, 0, stream>>>(in, rows, cols, ld_in, out, ld_out);
  return cudaGetLastError();
}

cudaError_t launch_gemm_block_scales(const float* grid, int64_t row_blocks, int64_t col_blocks,
                                     bool contract_rows, float* out, cudaStream_t stream) {
  const int64_t contracted = contract_rows ? row_blocks : col_blocks;
  const int outer = static_cast<int>(contract_rows ? col_blocks : row_blocks);
  const int inner = static_cast<int>((contracted + 3) / 4 * 4);
  if (outer * inner == 0) return cudaSuccess;
  gemm_block_scales<<<(outer * inner + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
      grid, static_cast<int>(row_blocks), static_cast<int>(col_blocks), contract_rows, outer, inner,
      out);
  return cudaGetLastError();
}

}  // namespace qshard::cuda
