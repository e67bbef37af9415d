// Stores of a warpgroup's sums in D, as bfloat16, float16 or float32: written, or added to D.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/device/sm90.cuh"

namespace qshard::cuda {

constexpr int kWarpgroup = 128;

/// Two values of 16 bits in a word: bfloat16 or, where `is_half`, float16.
__device__ __forceinline__ uint32_t two_values(float low, float high, bool is_half) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  const __half2 halves = __floats2half2_rn(low, high);
  return is_half ? *reinterpret_cast<const uint32_t*>(&halves)
                 : *reinterpret_cast<const uint32_t*>(&two);
}

/// The sums of two such pairs.
__device__ __forceinline__ uint32_t add_values(uint32_t a, uint32_t b, bool is_half) {
  const auto value = [&](uint32_t word, int i) {
    const auto bits = static_cast<uint16_t>(word >> (16 * i));
    return is_half ? __half2float(__ushort_as_half(bits))
                   : __uint_as_float(static_cast<uint32_t>(bits) << 16);
  };
  return two_values(value(a, 0) + value(b, 0), value(a, 1) + value(b, 1), is_half);
}

/// How D's values of 16 bits are stored.
struct StoredWords {
  bool is_half;
  bool adds;  // to those that are there
};

/// Four lanes hold a row's columns 2q and 2q + 1 of four blocks of 8: then lane q holds block q.
__device__ __forceinline__ void gather_blocks(uint32_t (&v)[4], int q) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, q & 1 ? v[i] : v[i + 1], 1);
    (q & 1 ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, q & 2 ? v[i] : v[i + 2], 2);
    (q & 2 ? v[i] : v[i + 2]) = got;
  }
}

/// Writes `rows` x `columns` of the sums of 64 x 128, rows `pitch` values apart. In vectors:
/// `pitch` is a multiple of 8, and `to` of as many bytes as a vector has.
template <bool kInVectors>
__device__ __forceinline__ void store_words(const float (&sums)[sm90::kSums], uint16_t* to,
                                            int64_t pitch, int rows, int columns, StoredWords as) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int q = lane % 4;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool has_row = row + 8 * half < rows;
    uint16_t* to_row = to + (row + 8 * half) * pitch + 8 * q;
    // No branches around the exchanges, which then overlap.
    uint32_t v[4][4];
#pragma unroll
    for (int four = 0; four < 4; ++four) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * four + 4 * i + 2 * half;
        v[four][i] = two_values(sums[at], sums[at + 1], as.is_half);
      }
      gather_blocks(v[four], q);
    }
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const int column = 32 * four + 8 * q;
      if (!has_row || column >= columns) continue;
      if constexpr (kInVectors) {
        auto* vector = reinterpret_cast<uint4*>(to_row + 32 * four);
        if (as.adds) {
          const uint4 there = *vector;
          v[four][0] = add_values(v[four][0], there.x, as.is_half);
          v[four][1] = add_values(v[four][1], there.y, as.is_half);
          v[four][2] = add_values(v[four][2], there.z, as.is_half);
          v[four][3] = add_values(v[four][3], there.w, as.is_half);
        }
        *vector = make_uint4(v[four][0], v[four][1], v[four][2], v[four][3]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (column + i < columns) {
            uint16_t& value = to_row[32 * four + i];
            uint32_t word = v[four][i / 2] >> (16 * (i % 2)) & 0xffff;
            if (as.adds) word = add_values(word, value, as.is_half);
            value = static_cast<uint16_t>(word);
          }
        }
      }
    }
  }
}

/// The same of D in fp32, in pairs or one by one.
template <bool kInVectors>
__device__ __forceinline__ void store_floats(const float (&sums)[sm90::kSums], float* to,
                                             int64_t pitch, int rows, int columns, bool adds) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= rows) continue;
    float* to_row = to + (row + 8 * half) * pitch;
#pragma unroll
    for (int eight = 0; eight < sm90::kSums / 4; ++eight) {
      const int column = 8 * eight + 2 * (lane % 4);
      if (column >= columns) continue;
      float2 two = make_float2(sums[4 * eight + 2 * half], sums[4 * eight + 2 * half + 1]);
      if constexpr (kInVectors) {
        auto* pair = reinterpret_cast<float2*>(to_row + column);
        if (adds) two = make_float2(two.x + pair->x, two.y + pair->y);
        *pair = two;
      } else {
        const bool has_second = column + 1 < columns;
        to_row[column] = adds ? two.x + to_row[column] : two.x;
        if (has_second) to_row[column + 1] = adds ? two.y + to_row[column + 1] : two.y;
      }
    }
  }
}

}  // namespace qshard::cuda
