// What writes tiles of row images with row-local scales, given the values in registers.
#pragma once

#include "kernels/device/stochastic_codes.cuh"
#include "kernels/quantize/row_scaled/tile.cuh"

namespace qshard::cuda {

__host__ __device__ __forceinline__ int64_t words_to_zero(const RowScaledTask& task) {
  return static_cast<int64_t>(task.rows - task.live_rows) * (task.row_bytes / 16);
}

__host__ __device__ __forceinline__ int zero_blocks(const RowScaledTask& task) {
  return static_cast<int>((words_to_zero(task) + kZerosPerBlock - 1) / kZerosPerBlock);
}

/// `range`: nvfp4_range() of the format, which the tensor's scale leaves to its blocks.
__device__ __forceinline__ void write_rest(const RowScaledTask& task, int block,
                                           float range = nvfp4_range(false)) {
  const int zeroing = zero_blocks(task);
  if (block < zeroing) {
    uint8_t* image = task.image + static_cast<int64_t>(task.live_rows) * task.row_bytes;
    write_zeros(reinterpret_cast<uint4*>(image), words_to_zero(task), block);
    return;
  }
  const int i = (block - zeroing) * kRowScaledThreads + static_cast<int>(threadIdx.x);
  if (i >= task.grid_numel) return;
  write_scale_inv(task, i, nvfp4_tensor_scale_inv(task.amax[i], range));
}

/// Chooses the scale of a block that lies in kLanes lanes by comparing the errors of both choices.
template <int kLanes, typename Value>
__device__ __forceinline__ BlockScale four_over_six_scale(const Vector<Value>& x, float amax,
                                                          float tensor_scale) {
  constexpr int kSize = Vector<Value>::kSize;
  const FourOverSix scales(amax, tensor_scale);
  float six[kSize], four[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float value = Value::load(x.word_of(i), i % Value::kPerWord);
    six[i] = nvfp4_squared_error(value, scales.six, tensor_scale);
    four[i] = nvfp4_squared_error(value, scales.four, tensor_scale);
  }
  float error_of_six = sum_in_pairs(six);
  float error_of_four = sum_in_pairs(four);
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    error_of_six += __shfl_xor_sync(kWholeWarp, error_of_six, distance);
    error_of_four += __shfl_xor_sync(kWholeWarp, error_of_four, distance);
  }
  return scales.better(error_of_six, error_of_four);
}

/// Writes a tile's scales of one row of the image; the last tile's pad the row.
template <typename Scales>
__device__ __forceinline__ void write_scales(const RowScaledTask& task, int tile_col,
                                             uint8_t* image_row, Scales scales) {
  constexpr int kSize = static_cast<int>(sizeof(Scales));
  int at = task.row_scale_offset + tile_col * kSize;
  store_bytes(image_row + at, scales);
  if (tile_col + 1 < task.tile_cols) return;
#pragma unroll 1
  for (at += kSize; at < task.image_row_bytes; at += kSize) store_bytes(image_row + at, Scales{});
}

/// Writes a lane's codes of the tile's rows [first_row, first_row + kRows) with stochastic
/// rounding: scale_of(i) is what row first_row + i is multiplied by.
template <typename Code, typename Value, int kRows, typename ScaleOf>
__device__ __forceinline__ void write_codes_stochastic(const StochasticRowScaledTask& task,
                                                       int first_row, int row_begin, int row_end,
                                                       int col, const Vector<Value> (&x)[kRows],
                                                       const ScaleOf& scale_of, uint8_t* codes) {
  const RandomWords random(task.rounding);
#pragma unroll
  for (int i = 0; i < kRows; ++i, codes += task.row_bytes) {
    const int row = first_row + i;
    if (row < row_begin || row >= row_end) continue;
    uint32_t words[Vector<Value>::kSize];
    random.get(task.element + row * task.element_pitch + col, words);
    store_bytes(codes, encode_vector_stochastic<Code>(x[i], scale_of(i), words));
  }
}

/// Writes codes and scales of a tile from this lane's vectors, those of load_rows(): finds the
/// blocks' amaxes, then encodes. `col` is the column of the lane's first value.
template <typename Kind, typename Value, typename Task>
__device__ __forceinline__ void quantize_tile(const Task& task, const RowScaledTile& tile, int col,
                                              const Vector<Value> (&x)[kRowsPerWarp]) {
  using Code = typename Kind::Code;
  using Codes = VectorBytes<Code, Value>;
  using Row = TileRow<Value, Kind::kBlockCols>;
  constexpr int kScales = Row::kScales;
  using Scales = Bytes<kScales>;
  // Rows of a warp that share a block; each of these parts has its own amax at first.
  constexpr int kPartRows = Kind::kBlockRows < kRowsPerWarp ? Kind::kBlockRows : kRowsPerWarp;
  constexpr int kPartsPerWarp = kRowsPerWarp / kPartRows;
  constexpr int kPartsPerBlock = Kind::kBlockRows / kPartRows;
  constexpr int kBlockRowsPerTile = kCodeTileRows / Kind::kBlockRows;
  constexpr int kBlocks = kBlockRowsPerTile * kScales;
  __shared__ uint32_t part_amax[kRowScaledWarps * kPartsPerWarp][kScales];
  __shared__ float encode_scale[kBlockRowsPerTile][kScales];
  __shared__ Scales scale_bytes[kBlockRowsPerTile];

  const int thread = static_cast<int>(threadIdx.x);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first_row = tile.origin + warp * kRowsPerWarp;

  // While the values are under way.
  float tensor_scale = 1.f;
  if constexpr (Kind::kRowScale == RowScale::kE4M3) {
    if (Kind::kFourOverSix || thread < kBlocks) {
      constexpr float kRange = nvfp4_range(Kind::kFourOverSix);
      const float amax = __ldg(task.amax + tile.matrix);
      tensor_scale = nvfp4_tensor_scale(nvfp4_tensor_scale_inv(amax, kRange));
    }
  }

#pragma unroll
  for (int part = 0; part < kPartsPerWarp; ++part) {
    const uint32_t largest =
        max_over_lanes<Row::kLanes>(largest_of<Value, kPartRows>(x + part * kPartRows));
    if constexpr (Kind::kFourOverSix) {  // the block's values are those of these lanes
      const BlockScale scale =
          four_over_six_scale<Row::kLanes>(x[part], __uint_as_float(largest), tensor_scale);
      if (lane % Row::kLanes == 0) {
        const int row = warp * kRowsPerWarp + part;
        encode_scale[row][lane / Row::kLanes] = scale.encode;
        reinterpret_cast<uint8_t*>(scale_bytes + row)[lane / Row::kLanes] = scale.byte;
      }
    } else if (lane % Row::kLanes == 0) {
      part_amax[warp * kPartsPerWarp + part][lane / Row::kLanes] = largest;
    }
  }
  __syncthreads();
  constexpr int kSteps = (kBlocks + kRowScaledThreads - 1) / kRowScaledThreads;
#pragma unroll
  for (int step = 0; step < (Kind::kFourOverSix ? 0 : kSteps); ++step) {
    const int i = thread + step * kRowScaledThreads;
    if (i >= kBlocks) break;
    const int block_row = i / kScales;
    const int j = i % kScales;
    const int block_col = tile.tile_col * kScales + j;
    uint32_t largest = 0;
#pragma unroll
    for (int part = 0; part < kPartsPerBlock; ++part) {
      largest = max(largest, part_amax[block_row * kPartsPerBlock + part][j]);
    }
    float amax = __uint_as_float(largest);
    const int row = max(tile.origin + block_row * Kind::kBlockRows, 0);
    if (row < tile.row_end && block_col < task.block_cols) {
      const int entry = boundary_entry(task, row);
      if (entry >= 0) amax = __ldg(task.amax + entry + block_col);
    }
    BlockScale scale = block_scale(Kind::kRowScale, amax, tensor_scale);
    // What pads a row is 0, as the scale of no values is in other formats.
    if (Kind::kRowScale == RowScale::kE8M0AsFp32 && block_col >= task.block_cols) scale.byte = 0;
    encode_scale[block_row][j] = scale.encode;
    reinterpret_cast<uint8_t*>(scale_bytes + block_row)[j] = scale.byte;
  }
  __syncthreads();

  const int block_row = warp * kRowsPerWarp / Kind::kBlockRows;
  float scale[kPartsPerWarp];
#pragma unroll
  for (int part = 0; part < kPartsPerWarp; ++part) {
    scale[part] = encode_scale[block_row + part][lane / Row::kLanes];
  }
  uint8_t* image = task.image + static_cast<int64_t>(first_row) * task.row_bytes;
  const int code_byte = (tile.tile_col * 32 + lane) * static_cast<int>(sizeof(Codes));
  uint8_t* codes = image + code_byte;
  const int row_end = code_byte < task.row_scale_offset ? tile.row_end : INT_MIN;
  if constexpr (std::is_same_v<Task, StochasticRowScaledTask>) {
    const auto scale_of = [&](int i) { return scale[i / kPartRows]; };
    write_codes_stochastic<Code>(task, first_row, tile.row_begin, row_end, col, x, scale_of, codes);
  } else {
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i, codes += task.row_bytes) {
      const int row = first_row + i;
      if (row >= tile.row_begin && row < row_end) {
        store_bytes(codes, encode_vector<Code>(x[i], scale[i / kPartRows]));
      }
    }
  }

  const int row = first_row + lane;
  if (lane < kRowsPerWarp && row >= tile.row_begin && row < tile.row_end) {
    write_scales(task, tile.tile_col, image + static_cast<int64_t>(lane) * task.row_bytes,
                 scale_bytes[block_row + lane / Kind::kBlockRows]);
  }
}

}  // namespace qshard::cuda
