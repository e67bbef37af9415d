// Codes of rows that hold their scales, as a GEMM takes them: the same codes along rows; along
// columns those that the largest scale of a tile's rows leaves of them, or of all rows of a group
// where a row has one scale.
//
// 2 bytes per code with one orientation, 3 with both; none where only the scales of rows are asked
// for. Where a row has one scale, a pass before finds the largest, which reads 512 codes of a row,
// and more only of zeros. Each thread has 8 neighbouring codes of 8 rows, as a tile of bfloat16
// values has them, and the columns' codes are encoded from such values: a code times a power of two
// from 2^-20 on is one.
#include "kernels/activation/codes.cuh"
#include "kernels/numerics/row_scales.h"

namespace qshard::cuda {
namespace {

using Tile = ActivationTile<BFloat16>;
using Codes = VectorBytes<E4M3, BFloat16>;

struct Repack {
  CodedRows from;
  ActivationTask to;
};

/// This thread's codes of a tile, and the scales of their rows.
struct CodedTile {
  Codes codes[Tile::kRows];
  uint8_t scale[Tile::kRows];

  /// `end`: rows from there on are zeros, whose scale is 1. Codes are read if some are written.
  __device__ CodedTile(const Tile& tile, const Repack& task, int64_t tile_row, int64_t end,
                       int64_t tile_col) {
    const int64_t c = tile_col + tile.col;
    const bool is_read = task.to.codes != nullptr || task.to.codes_t != nullptr;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int64_t r = tile_row + tile.row + i;
      const uint8_t* from = task.from.image + r * task.from.pitch;
      codes[i] = {};
      scale[i] = kE8M0One;
      if (r >= end) continue;
      scale[i] =
          __ldg(from + task.from.scale_offset + (task.from.has_row_scale ? 0 : tile_col / kTile));
      // Codes up to a multiple of 16 are there, and of these the last ones may be anything.
      if (is_read && c < task.to.k) codes[i] = __ldg(reinterpret_cast<const Codes*>(from + c));
      if (c + 8 > task.to.k) clear_from(codes[i], static_cast<int>(task.to.k - c));
    }
  }

  /// Codes from the `count`-th on become 0.
  __device__ static void clear_from(Codes& row, int count) {
    const auto kept = [&](int first) {
      const int bytes = max(0, min(4, count - first));
      return bytes == 4 ? 0xffffffffu : (1u << (8 * bytes)) - 1;
    };
    row.x &= kept(0);
    row.y &= kept(4);
  }

  /// The largest scale of rows with any code but 0 in this thread, plus 1; 0 without.
  __device__ uint32_t largest_scale() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      if (((codes[i].x | codes[i].y) & 0x7f7f7f7fu) != 0) {
        largest = max(largest, static_cast<uint32_t>(scale[i]) + 1);
      }
    }
    return largest;
  }

  /// Leaves the codes in `tile` as values in units of a column's scale; returns whether one is NaN.
  __device__ bool rescale(Tile& tile, uint8_t largest) const {
    bool found = false;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const float factor = rescaling(scale[i], largest);
      const bool is_odd = has_nan<E4M3, BFloat16>(codes[i]);
      const uint4 x = is_odd ? assemble<BFloat16>([&](int k) {
        return decode_one<E4M3, BFloat16>(codes[i], k, factor);
      })
                             : decode_vector<E4M3, BFloat16>(codes[i], factor);
      tile.values[i] = {{x.x, x.y, x.z, x.w}};
      found |= is_odd;
    }
    return found;
  }
};

__device__ __forceinline__ void store_column_scales(const ActivationTask& task, int64_t column,
                                                    int64_t tile_col, float scale_inv) {
  const int64_t block = column / kTile;
  if (task.square_columns) {
    store_square_scale(task, block, tile_col / kTile, scale_inv);
  } else if (threadIdx.x < kTile && tile_col + threadIdx.x < task.k_padded) {
    const int64_t c = tile_col + threadIdx.x;
    task.scale_inv_t[block * task.k_padded + c] = c < task.k ? scale_inv : 1.f;
  }
}

/// Rows [tile_row, end), which begin at `column` of the transposed codes.
__device__ __forceinline__ void repack_tile(const Repack& task, int64_t tile_row, int64_t end,
                                            int64_t column, int64_t tile_col,
                                            Tile::Shared& shared) {
  Tile tile;
  const CodedTile coded(tile, task, tile_row, end, tile_col);
  const ActivationTask& to = task.to;
  if (to.codes != nullptr) tile.store_codes(to, tile_row, tile_col, coded.codes);
  if (to.scale_inv != nullptr) {
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
      const int64_t r = tile_row + tile.row + i;
      if (tile.col == 0 && r < to.rows_written) {
        to.scale_inv[tile_col / kTile * to.m_padded + r] = e8m0_to_float(coded.scale[i]);
      }
    }
  }
  if (to.codes_t == nullptr) return;
  const uint32_t found = max_of_block<kTileThreads>(coded.largest_scale());
  const auto largest = static_cast<uint8_t>(found == 0 ? kE8M0One : found - 1);
  store_column_scales(to, column, tile_col, e8m0_to_float(largest));
  const bool has_nan = coded.rescale(tile, largest);
  tile.store_columns<E4M3>(to, column, tile_col, shared, has_nan, [](int) { return 1.f; });
}

__global__ void __launch_bounds__(kTileThreads) repack(const __grid_constant__ Repack task) {
  __shared__ Tile::Shared shared;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  repack_tile(task, tile_row, task.to.m, tile_row, static_cast<int64_t>(blockIdx.x) * kTile,
              shared);
}

__global__ void __launch_bounds__(kTileThreads)
    repack_groups(const __grid_constant__ Repack given, const RowTile* tiles) {
  __shared__ Tile::Shared shared;
  const RowTile place = tiles[blockIdx.y];
  if (place.row < 0) return;
  Repack task = given;
  task.to.rows_written = place.end;
  repack_tile(task, place.row, place.end, place.column, static_cast<int64_t>(blockIdx.x) * kTile,
              shared);
}

/// Whether a row of `count` codes has any but 0, by a warp.
__device__ __forceinline__ bool has_code(const uint8_t* codes, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += 512) {
    const int64_t c = begin + threadIdx.x % 32 * 16;
    bool found = false;
    if (c < count) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(codes + c));
      VectorBytes<E4M3, BFloat16> low{x.x, x.y}, high{x.z, x.w};
      CodedTile::clear_from(low, static_cast<int>(min(count - c, int64_t{16})));
      CodedTile::clear_from(high, static_cast<int>(min(count - c, int64_t{16})) - 8);
      found = ((low.x | low.y | high.x | high.y) & 0x7f7f7f7fu) != 0;
    }
    if (__any_sync(kWholeWarp, found)) return true;
  }
  return false;
}

constexpr int kScaleRows = 16;  // a CUDA block reads as many rows, each of its warps two
constexpr int kScaleParts = kTile / kScaleRows;

/// The tile of rows that a CUDA block has.
__device__ __forceinline__ RowTile tile_of(const ActivationTask& task, const RowTile* tiles,
                                           uint32_t index) {
  if (tiles != nullptr) return tiles[index];
  const int row = static_cast<int>(index) * kTile;
  return {row, static_cast<int>(task.m), row, 0};
}

/// Scales of rows, and the largest of each group, plus 1.
__global__ void __launch_bounds__(kTileThreads)
    repack_row_scales(const __grid_constant__ Repack task, const RowTile* tiles, int32_t* largest) {
  const RowTile place = tile_of(task.to, tiles, blockIdx.y);
  if (place.row < 0) return;
  const int first = place.row + static_cast<int>(blockIdx.x) * kScaleRows;
  const int end = min(first + kScaleRows, place.end);
  uint32_t found = 0;
  for (int row = first + static_cast<int>(threadIdx.x) / 32; row < end; row += kTileThreads / 32) {
    const uint8_t* codes = task.from.image + row * task.from.pitch;
    const uint8_t scale = __ldg(codes + task.from.scale_offset);
    if (task.to.scale_inv != nullptr && threadIdx.x % 32 == 0) {
      task.to.scale_inv[row] = e8m0_to_float(scale);
    }
    if (task.to.codes_t != nullptr && has_code(codes, task.to.k)) {
      found = max(found, static_cast<uint32_t>(scale) + 1);
    }
  }
  if (task.to.codes_t == nullptr) return;
  found = max_of_block<kTileThreads>(found);
  if (threadIdx.x == 0 && found != 0) atomicMax(largest + place.group, static_cast<int>(found));
}

__device__ __forceinline__ uint8_t largest_scale(int32_t found) {
  return static_cast<uint8_t>(found == 0 ? kE8M0One : found - 1);
}

__global__ void __launch_bounds__(kTileThreads)
    repack_columns(const __grid_constant__ Repack task, const RowTile* tiles,
                   const int32_t* largest) {
  __shared__ Tile::Shared shared;
  const RowTile place = tile_of(task.to, tiles, blockIdx.y);
  if (place.row < 0) return;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  Tile tile;
  const CodedTile coded(tile, task, place.row, place.end, tile_col);
  const bool has_nan = coded.rescale(tile, largest_scale(largest[place.group]));
  tile.store_columns<E4M3>(task.to, place.column, tile_col, shared, has_nan,
                           [](int) { return 1.f; });
}

__global__ void __launch_bounds__(kTileThreads)
    repack_largest(const __grid_constant__ LargestScales from, float* scale_inv) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kTileThreads + threadIdx.x;
  if (i >= from.scales) return;
  scale_inv[i] = e8m0_to_float(largest_scale(from.largest[from.groups == 1 ? 0 : i]));
}

}  // namespace

cudaError_t launch_repack_in_rows(const CodedRows& rows, const ActivationTask& task,
                                  const LargestScales& scales, cudaStream_t stream) {
  const bool has_columns = task.codes_t != nullptr;
  if (has_columns) {
    const cudaError_t zeroed = cudaMemsetAsync(
        scales.largest, 0, static_cast<size_t>(scales.groups) * sizeof(int32_t), stream);
    if (zeroed != cudaSuccess) return zeroed;
  }
  const Repack repack{rows, task};
  const dim3 tiles = activation_grid(task);
  const unsigned row_tiles =
      scales.tiles == nullptr ? tiles.y : static_cast<unsigned>(scales.tile_count);
  const bool has_any = task.m != 0 && task.k != 0 && row_tiles != 0;
  if (has_any) {
    repack_row_scales<<<dim3(kScaleParts, row_tiles), kTileThreads, 0, stream>>>(
        repack, scales.tiles, scales.largest);
  }
  if (!has_columns) return cudaGetLastError();
  if (has_any) {
    repack_columns<<<dim3(tiles.x, row_tiles), kTileThreads, 0, stream>>>(repack, scales.tiles,
                                                                          scales.largest);
  }
  const auto blocks = static_cast<unsigned>((scales.scales + kTileThreads - 1) / kTileThreads);
  repack_largest<<<blocks, kTileThreads, 0, stream>>>(scales, task.scale_inv_t);
  return cudaGetLastError();
}

cudaError_t launch_repack(const CodedRows& rows, const ActivationTask& task, cudaStream_t stream) {
  if (task.m == 0 || task.k == 0) return cudaSuccess;
  repack<<<activation_grid(task), kTileThreads, 0, stream>>>({rows, task});
  return cudaGetLastError();
}

cudaError_t launch_repack_groups(const CodedRows& rows, const ActivationTask& task,
                                 const RowTile* tiles, int64_t count, cudaStream_t stream) {
  if (task.m == 0 || task.k == 0 || count == 0) return cudaSuccess;
  const dim3 grid(activation_grid(task).x, static_cast<unsigned>(count));
  repack_groups<<<grid, kTileThreads, 0, stream>>>({rows, task}, tiles);
  return cudaGetLastError();
}

}  // namespace qshard::cuda
