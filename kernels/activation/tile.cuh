// One 128x128 tile of an activation: read once, written as codes in both orientations.
//
// Each of kThreads threads holds kRows x kCols neighbouring values in registers. Row and column
// maxima come from shuffles; the transposed codes pass through shared memory in 8-byte chunks of
// one column.
#pragma once

#include "kernels/activation/kernels.h"
#include "kernels/device/unaligned_vectors.cuh"
#include "kernels/device/vector_codes.cuh"

namespace qshard::cuda {

constexpr int kTile = 128;
constexpr int kTileThreads = 256;

template <typename Value, int kThreads = kTileThreads>
struct ActivationTile {
  using Raw = typename Value::Raw;
  static constexpr int kCols = Vector<Value>::kSize;
  static constexpr int kRows = kTile * kTile / kThreads / kCols;
  static constexpr int kLanesPerRow = kTile / kCols;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kChunks = kTile / 8;  // 8-byte chunks in a row of transposed codes

  struct Shared {
    uint2 transposed[kTile][kChunks];
    uint32_t column_amax[kWarps][kTile / Value::kPerWord];
    float column_scale[kTile];
  };

  Vector<Value> values[kRows];
  int row;  // of the thread's first value, within the tile
  int col;

  __device__ ActivationTile() {
    row = static_cast<int>(threadIdx.x) / kLanesPerRow * kRows;
    col = static_cast<int>(threadIdx.x) % kLanesPerRow * kCols;
  }

  // Values outside (m, k) are 0, which changes no amax and has code 0.
  __device__ void load(const ActivationTask& task, int64_t tile_row, int64_t tile_col,
                       bool vectorized) {
    load(task.values, task.m, task.k, task.k, tile_row, tile_col, vectorized);
  }

  /// Reads this thread's part of values (m, k), whose rows lie `ld` values apart.
  __device__ void load(const void* from_all, int64_t m, int64_t k, int64_t ld, int64_t tile_row,
                       int64_t tile_col, bool vectorized) {
    const int64_t c = tile_col + col;
    const Raw* from = static_cast<const Raw*>(from_all) + (tile_row + row) * ld + c;
    const int rows = c < k ? static_cast<int>(min(m - tile_row, int64_t{kTile})) - row : 0;
    const auto load_rows = [&](const auto& load_one) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        values[i] = {};
        if (i < rows) values[i] = load_one(from + i * ld);
      }
    };
    const int count = static_cast<int>(min(k - c, int64_t{kCols}));
    if (vectorized) {
      load_rows([](const auto* x) { return load_vector<Value>(x); });
    } else if (can_load_shifted(from_all, 1, (m - 1) * ld + k, from,
                                from + (min(rows, kRows) - 1) * ld)) {
      load_rows([&](const auto* x) { return load_shifted<Value>(x, count); });
    } else {
      load_rows([&](const auto* x) { return load_some<Value>(x, count); });
    }
  }

  /// fp32 bits of the largest |x| of each of the thread's rows over the whole tile row.
  __device__ void row_amax(uint32_t (&amax)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint32_t largest = 0;
#pragma unroll
      for (uint32_t word : values[i].word) largest = Value::max(largest, Value::magnitudes(word));
#pragma unroll
      for (int lane = kLanesPerRow / 2; lane > 0; lane /= 2) {
        largest = Value::max(largest, __shfl_xor_sync(kWholeWarp, largest, lane));
      }
      amax[i] = Value::amax_bits(largest);
    }
  }

  /// Leaves each warp's column maxima in shared memory; the caller synchronises. Returns the fp32
  /// bits of the largest |x| of the thread's columns in its warp.
  __device__ uint32_t column_amax(Shared& shared) const {
    uint32_t largest_of_all = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        largest = Value::max(largest, Value::magnitudes(values[i].word[w]));
      }
      // A warp holds 32 / kLanesPerRow groups of rows.
#pragma unroll
      for (int lane = kLanesPerRow; lane < 32; lane *= 2) {
        largest = Value::max(largest, __shfl_xor_sync(kWholeWarp, largest, lane));
      }
      if (threadIdx.x % 32 < kLanesPerRow) {
        shared.column_amax[threadIdx.x / 32][col / Value::kPerWord + w] = largest;
      }
      largest_of_all = Value::max(largest_of_all, largest);
    }
    return Value::amax_bits(largest_of_all);
  }

  /// fp32 bits of the largest |x| of a column, once column_amax is done.
  __device__ static uint32_t reduce_column_amax(const Shared& shared, int column) {
    uint32_t largest = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      largest = Value::max(largest, shared.column_amax[warp][column / Value::kPerWord]);
    }
    return Value::amax_bits(largest, column % Value::kPerWord);
  }

  // Codes of NaNs cost more: `has_nan` is whether one of the thread's values may be NaN.

  /// Writes the tile's codes; scale_of(i) is the scale of the thread's i-th row.
  template <typename Code, typename ScaleOf>
  __device__ void store_rows(const ActivationTask& task, int64_t tile_row, int64_t tile_col,
                             bool has_nan, const ScaleOf& scale_of) const {
    VectorBytes<Code, Value> codes[kRows];
    encode<Code>(codes, has_nan, scale_of);
    store_codes(task, tile_row, tile_col, codes);
  }

  /// Writes the transposed tile's codes; scale_of(j) is the scale of the thread's j-th column.
  /// Synchronises the CUDA block.
  template <typename Code, typename ScaleOf>
  __device__ void store_columns(const ActivationTask& task, int64_t tile_row, int64_t tile_col,
                                Shared& shared, bool has_nan, const ScaleOf& scale_of) const {
    with(has_nan, [&](auto may_be_nan) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const float scale = scale_of(j);
        uint32_t four[kRows / 4];
#pragma unroll
        for (int r = 0; r < kRows; r += 4) {
          four[r / 4] = encode4<Code, decltype(may_be_nan)::value, Value>(
              values[r].word_of(j), values[r + 1].word_of(j), values[r + 2].word_of(j),
              values[r + 3].word_of(j), j % Value::kPerWord, scale);
        }
        put_column(shared, j, four);
      }
    });
    store_transposed(task, tile_row, tile_col, shared);
  }

  /// Writes codes in the orientations that the task has, all by one scale: the transposed ones are
  /// the same bytes. With codes_t synchronises the CUDA block.
  template <typename Code>
  __device__ void store_both(const ActivationTask& task, int64_t tile_row, int64_t tile_col,
                             Shared& shared, bool has_nan, float scale) const {
    VectorBytes<Code, Value> codes[kRows];
    encode<Code>(codes, has_nan, [&](int) { return scale; });
    if (task.codes != nullptr) store_codes(task, tile_row, tile_col, codes);
    if (task.codes_t == nullptr) return;
#pragma unroll
    for (int j = 0; j < kCols; j += 4) {
      uint32_t four[4][kRows / 4];
#pragma unroll
      for (int r = 0; r < kRows; r += 4) {
        uint32_t square[4];
        transpose4(square, word_at(codes[r], j), word_at(codes[r + 1], j), word_at(codes[r + 2], j),
                   word_at(codes[r + 3], j));
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i][r / 4] = square[i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) put_column(shared, j + i, four[i]);
    }
    store_transposed(task, tile_row, tile_col, shared);
  }

  /// Writes codes that the thread has of its rows.
  __device__ void store_codes(const ActivationTask& task, int64_t tile_row, int64_t tile_col,
                              const VectorBytes<E4M3, Value> (&codes)[kRows]) const {
    const int64_t c = tile_col + col;
    if (c >= task.k_padded) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t r = tile_row + row + i;
      if (r >= task.rows_written) return;
      store_bytes(task.codes + r * task.k_padded + c, codes[i]);
    }
  }

 private:
  template <typename Run>
  __device__ static void with(bool has_nan, const Run& run) {
    if (has_nan) {
      run(std::true_type{});
    } else {
      run(std::false_type{});
    }
  }

  template <typename Code, typename ScaleOf>
  __device__ void encode(VectorBytes<Code, Value> (&codes)[kRows], bool has_nan,
                         const ScaleOf& scale_of) const {
    with(has_nan, [&](auto may_be_nan) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        codes[i] = encode_vector<Code, decltype(may_be_nan)::value>(values[i], scale_of(i));
      }
    });
  }

  __device__ static int swizzle(int column) { return (column >> 3) & (kChunks - 1); }

  /// The bytes (i, j) of four words become (j, i).
  __device__ static void transpose4(uint32_t (&square)[4], uint32_t a, uint32_t b, uint32_t c,
                                    uint32_t d) {
    const uint32_t ab_low = __byte_perm(a, b, 0x5140);
    const uint32_t ab_high = __byte_perm(a, b, 0x7362);
    const uint32_t cd_low = __byte_perm(c, d, 0x5140);
    const uint32_t cd_high = __byte_perm(c, d, 0x7362);
    square[0] = __byte_perm(ab_low, cd_low, 0x5410);
    square[1] = __byte_perm(ab_low, cd_low, 0x7632);
    square[2] = __byte_perm(ab_high, cd_high, 0x5410);
    square[3] = __byte_perm(ab_high, cd_high, 0x7632);
  }

  /// Codes of the thread's j-th column, four to a word.
  __device__ void put_column(Shared& shared, int j, const uint32_t (&four)[kRows / 4]) const {
#pragma unroll
    for (int chunk = 0; chunk < (kRows + 7) / 8; ++chunk) {
      // The xor spreads the columns that a warp writes at once over the banks.
      uint2& to = shared.transposed[col + j][(row / 8 + chunk) ^ swizzle(col + j)];
      if constexpr (kRows < 8) {
        (row % 8 == 0 ? to.x : to.y) = four[0];
      } else {
        to = make_uint2(four[2 * chunk], four[2 * chunk + 1]);
      }
    }
  }

  /// Writes what put_column() has put of all columns. Synchronises the CUDA block.
  __device__ static void store_transposed(const ActivationTask& task, int64_t tile_row,
                                          int64_t tile_col, const Shared& shared) {
    __syncthreads();
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
#pragma unroll
    for (int pass = 0; pass < kTile * kChunks / kThreads; ++pass) {
      const int c = static_cast<int>(threadIdx.x) / kChunks + pass * (kThreads / kChunks);
      if (tile_col + c >= task.k_padded) return;
      *reinterpret_cast<uint2*>(task.codes_t + (tile_col + c) * task.m_padded_t + tile_row +
                                chunk * 8) = shared.transposed[c][chunk ^ swizzle(c)];
    }
  }
};

/// CUDA blocks that cover a task: one per tile, columns fastest.
inline dim3 activation_grid(const ActivationTask& task) {
  return dim3(static_cast<unsigned>((task.k + kTile - 1) / kTile),
              static_cast<unsigned>((task.m + kTile - 1) / kTile));
}

inline bool activation_is_vectorized(const ActivationTask& task, DType dtype) {
  const int64_t size = value_size(dtype);
  return reinterpret_cast<uintptr_t>(task.values) % 16 == 0 && task.k * size % 16 == 0;
}

}  // namespace qshard::cuda
