// Transposed row images with row-local scales: codes in 128x128 tiles through shared memory, eight
// to a word (of bytes or of nibbles); then the scales, each once for every row of its block.
#include <cuda_runtime.h>

#include "kernels/transpose/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kChunks = kTile / 8;

/// Both images as the kernels see them; `in` has `rows` x `cols` values.
struct Images {
  const uint8_t* in;
  uint8_t* out;
  int64_t rows;
  int64_t cols;
  int64_t out_rows;
  int64_t in_row_bytes;
  int64_t out_row_bytes;
  int64_t in_scale_offset;  // codes and their padding lie before
  int64_t out_scale_offset;
  int64_t block;       // rows and columns of a block
  int64_t out_scales;  // per row
};

template <int kBits>
struct EightCodes;
template <>
struct EightCodes<8> {
  using Word = unsigned long long;
};
template <>
struct EightCodes<4> {
  using Word = unsigned;
};

template <int kBits>
__global__ void __launch_bounds__(kThreads) transpose_codes(const __grid_constant__ Images images) {
  using Word = typename EightCodes<kBits>::Word;
  constexpr Word kMask = (1u << kBits) - 1;
  __shared__ Word transposed[kTile][kChunks];
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  // A thread transposes 8 rows x 8 columns.
  const int row = static_cast<int>(threadIdx.x) / kChunks * 8;
  const int col = static_cast<int>(threadIdx.x) % kChunks * 8;
  const int64_t in_byte = (tile_col + col) / 8 * kBits;
  Word words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t r = tile_row + row + i;
    words[i] = 0;
    if (r < images.rows && in_byte < images.in_scale_offset) {
      words[i] =
          __ldg(reinterpret_cast<const Word*>(images.in + r * images.in_row_bytes + in_byte));
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    Word column = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) column |= (words[i] >> (kBits * j) & kMask) << (kBits * i);
    // The xor spreads the columns that a warp writes at once over the banks.
    transposed[col + j][(row / 8) ^ (col / 8)] = column;
  }
  __syncthreads();
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const int64_t out_byte = (tile_row / 8 + chunk) * kBits;
  if (out_byte >= images.out_scale_offset) return;
#pragma unroll
  for (int pass = 0; pass < kTile * kChunks / kThreads; ++pass) {
    const int c = static_cast<int>(threadIdx.x) / kChunks + pass * (kThreads / kChunks);
    if (tile_col + c >= images.out_rows) return;
    uint8_t* to = images.out + (tile_col + c) * images.out_row_bytes + out_byte;
    *reinterpret_cast<Word*>(to) = transposed[c][chunk ^ (c / 8)];
  }
}

/// A thread writes four scales of one row.
__global__ void __launch_bounds__(kThreads)
    transpose_scales(const __grid_constant__ Images images) {
  const int64_t words = (images.out_row_bytes - images.out_scale_offset) / 4;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / words;
  if (row >= images.out_rows) return;
  const int64_t first = i % words * 4;
  const uint8_t* column = images.in + images.in_scale_offset + row / images.block;
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (row < images.cols && first + k < images.out_scales) {
      const int64_t in_row = (first + k) * images.block;
      word |= static_cast<uint32_t>(__ldg(column + in_row * images.in_row_bytes)) << (8 * k);
    }
  }
  uint8_t* to = images.out + row * images.out_row_bytes + images.out_scale_offset + first;
  *reinterpret_cast<uint32_t*>(to) = word;
}

}  // namespace

cudaError_t launch_transpose_image(const TransposeImageTask& task, cudaStream_t stream) {
  const Layout& from = task.layout;
  const Layout to = transposed_layout(from);
  Images images;
  images.in = task.image;
  images.out = task.out;
  images.rows = from.rows;
  images.cols = from.cols;
  images.out_rows = to.rows;
  images.in_row_bytes = from.row_bytes();
  images.out_row_bytes = to.row_bytes();
  images.in_scale_offset = from.row_scale_offset();
  images.out_scale_offset = to.row_scale_offset();
  images.block = from.format->scale.block_cols;
  images.out_scales = to.block_cols();
  const dim3 tiles(static_cast<unsigned>(ceil_div(to.rows, kTile)),
                   static_cast<unsigned>(ceil_div(from.rows, kTile)));
  if (from.format->code_bits == 8) {
    transpose_codes<8><<<tiles, kThreads, 0, stream>>>(images);
  } else {
    transpose_codes<4><<<tiles, kThreads, 0, stream>>>(images);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const int64_t words = to.rows * (to.row_bytes() - to.row_scale_offset()) / 4;
  transpose_scales<<<static_cast<unsigned>(ceil_div(words, kThreads)), kThreads, 0, stream>>>(
      images);
  return cudaGetLastError();
}

}  // namespace qshard::cuda
