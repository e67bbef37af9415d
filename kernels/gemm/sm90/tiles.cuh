// Which tile of a grouped GEMM comes next: a warp finds it from the groups' ends on the device.
#pragma once

#include <cstdint>

#include "kernels/gemm/sm90/kernels.h"

namespace qshard::cuda {

/// One tile of D, and which products it sums.
struct TileWork {
  int a_row;     // the tile's first row, in A
  int matrix;    // the one of B that it multiplies
  int d_row;     // the tile's first row, in D
  int column;    // its first in D
  int rows;      // that D has of it: no more are stored
  int k_block;   // the first contracted one
  int k_blocks;  // how many; 0: the sum is zero; below: no tile, nor any after it
  int scale;     // index of its first scale of B in square_scales, or of its group's
};

/// A warp's walk over the groups, 32 at a time, one to a lane. Indices asked for must not decrease.
///
/// An end below an earlier one, or beyond T, is as if it were that: no group leaves A. Where groups
/// cut rows, those after the last group are a group of their own, which sums nothing.
template <GroupsAlong kAlong>
class TileWalk {
 public:
  __device__ TileWalk(const GroupedGemmArguments& arguments, int tile_rows, int tile_columns)
      : arguments_(arguments),
        lane_(static_cast<int>(threadIdx.x) % 32),
        tile_rows_(tile_rows),
        tile_columns_(tile_columns),
        columns_((arguments.n + tile_columns - 1) / tile_columns) {
    load();
  }

  /// All lanes get the tile; tile columns are those of a whole cluster.
  __device__ TileWork find(int index) {
    for (;;) {
      const unsigned found = __ballot_sync(kAll, index < tiles_before_ + tiles_);
      if (found != 0) return tile_of(__ffs(static_cast<int>(found)) - 1, index);
      first_ += 32;
      if (first_ >= groups()) return {.k_blocks = -1};
      tiles_before_ += __shfl_sync(kAll, tiles_, 31);
      blocks_before_ += __shfl_sync(kAll, blocks_, 31);
      row_before_ = __shfl_sync(kAll, end_, 31);
      load();
    }
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  // Tiles of about this many rows that share columns come one after the other: what all blocks read
  // at a time is about square, and stays in L2.
  static constexpr int kBandRows = 2048;

  __device__ int groups() const {
    return arguments_.groups + (kAlong == GroupsAlong::kRows ? 1 : 0);
  }
  __device__ static int ceil_div(int a, int b) { return (a + b - 1) / b; }

  /// The sum, or the largest, of this lane's value and those of all lanes before it.
  template <typename Join>
  __device__ int scan(int value, const Join& join) const {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kAll, value, distance);
      if (lane_ >= distance) value = join(value, other);
    }
    return value;
  }

  /// This lane's group: its end, and tiles and contracted blocks up to its own.
  __device__ void load() {
    const int group = first_ + lane_;
    int end = arguments_.total;
    if (group < arguments_.groups && arguments_.offs != nullptr) {
      end = __ldg(arguments_.offs + group);
    }
    if (group >= arguments_.groups && kAlong == GroupsAlong::kContraction) end = 0;
    end = min(max(end, row_before_), arguments_.total);
    end_ = scan(end, [](int a, int b) { return max(a, b); });
    const int before = __shfl_up_sync(kAll, end_, 1);
    start_ = lane_ == 0 ? row_before_ : before;
    const int length = end_ - start_;
    const auto plus = [](int a, int b) { return a + b; };
    int tiles = 0;
    if (kAlong == GroupsAlong::kRows) {
      tiles = ceil_div(length, tile_rows_) * columns_;
    } else {
      blocks_ = scan(ceil_div(length, 128), plus);
      if (group < arguments_.groups) tiles = ceil_div(arguments_.m, tile_rows_) * columns_;
    }
    tiles_ = scan(tiles, plus);
  }

  __device__ TileWork tile_of(int source, int index) const {
    const int group = first_ + source;
    const int start = __shfl_sync(kAll, start_, source);
    const int end = __shfl_sync(kAll, end_, source);
    const int previous = max(source - 1, 0);
    const int tiles_before = __shfl_sync(kAll, tiles_, previous);
    const int blocks_before = __shfl_sync(kAll, blocks_, previous);
    const int blocks_after = __shfl_sync(kAll, blocks_, source);
    const int blocks = source == 0 ? 0 : blocks_before;
    const int rows = kAlong == GroupsAlong::kRows ? end - start : arguments_.m;

    int in_group = index - tiles_before_ - (source == 0 ? 0 : tiles_before);
    const int tile_count = ceil_div(rows, tile_rows_);  // one below the other
    const int bands = max((rows + kBandRows / 2) / kBandRows, 1);
    const int band_height = ceil_div(tile_count, bands);
    const int band = in_group / (band_height * columns_);
    in_group -= band * band_height * columns_;
    const int height = min(band_height, tile_count - band * band_height);
    const int row = (band * band_height + in_group % height) * tile_rows_;
    const int column = in_group / height * tile_columns_;

    TileWork work;
    work.column = column;
    work.rows = min(tile_rows_, rows - row);
    if (kAlong == GroupsAlong::kRows) {
      const bool is_live = group < arguments_.groups;
      work.a_row = start + row;
      work.d_row = start + row;
      work.matrix = is_live ? group : 0;
      work.k_block = 0;
      work.k_blocks = is_live ? arguments_.k_blocks : 0;
      work.scale = !is_live ? 0 : arguments_.scales_groups ? group : group * arguments_.scale_group;
    } else {
      work.a_row = row;
      work.d_row = group * arguments_.m + row;
      work.matrix = 0;
      work.k_block = blocks_before_ + blocks;
      // Groups whose columns there are none of: no scale is read beyond the others.
      work.k_blocks = min(blocks_after - blocks, max(arguments_.k_blocks - work.k_block, 0));
      work.scale = arguments_.scales_groups ? group : work.k_block * arguments_.scale_block;
    }
    return work;
  }

  const GroupedGemmArguments& arguments_;
  int lane_;
  int tile_rows_;
  int tile_columns_;
  int columns_;    // how many tiles lie side by side
  int first_ = 0;  // lane 0's group
  // Counts of the groups before lane 0's, and where the last of them ends.
  int tiles_before_ = 0;
  int blocks_before_ = 0;
  int row_before_ = 0;
  // Rows of this lane's group; tiles and contracted blocks, with those of the lanes before it.
  int start_ = 0;
  int end_ = 0;
  int tiles_ = 0;
  int blocks_ = 0;
};

}  // namespace qshard::cuda
