// How a row's threads of a CUDA block hold and sum it.
#pragma once

#include <bit>

#include "kernels/device/vector_codes.cuh"
#include "kernels/norm/kernels.h"

namespace qshard::cuda {

constexpr int kNormThreads = 256;  // of a CUDA block, unless a row takes more
constexpr int kMiddleNormThreads = 320;
constexpr int kLongNormThreads = 512;
constexpr int kMaxNormThreads = 1024;
constexpr int kNormVectors = 2;  // of a row, that a thread holds

/// Reduces kCount numbers of each of kLanes lanes over all lanes. The lanes form kCount groups, and
/// a lane of group i gets number i: each step halves the lanes that hold a number, and the numbers
/// that a lane holds, then a butterfly ends it.
template <int kLanes, int kCount, typename T, typename Combine>
__device__ __forceinline__ T over_lanes(const T (&x)[kCount], const Combine& combine) {
  constexpr int kOther = kLanes / 2;
  if constexpr (kCount == 1) {
    T one = x[0];
#pragma unroll
    for (int lane = kOther; lane > 0; lane /= 2) {
      one = combine(one, __shfl_xor_sync(kWholeWarp, one, lane));
    }
    return one;
  } else {
    constexpr int kHalf = kCount / 2;
    static_assert(kCount == 2 * kHalf && kCount <= kLanes);
    const bool upper = threadIdx.x & kOther;
    T halves[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const T keep = upper ? x[i + kHalf] : x[i];
      const T give = upper ? x[i] : x[i + kHalf];
      halves[i] = combine(keep, __shfl_xor_sync(kWholeWarp, give, kOther));
    }
    return over_lanes<kOther>(halves, combine);
  }
}

/// A sum of a row's values, divided by their number: the quotient's bits, of all numbers of columns
/// that kernels take, for less than half of a division's instructions. (Markstein, IBM J. Res. Dev.
/// 34.1, 1990; a quotient below 2^-126 may be off by its last bit.)
class MeanOf {
 public:
  __device__ explicit MeanOf(int cols) : cols_(static_cast<float>(cols)), inverse_(1.f / cols_) {}

  __device__ float operator()(float sum) const {
    const float mean = __fmul_rn(sum, inverse_);
    const float rest = __fmaf_rn(-mean, cols_, sum);
    return isinf(sum) ? sum : __fmaf_rn(rest, inverse_, mean);
  }

 private:
  float cols_;
  float inverse_;
};

/// One register, which the compiler would rather compute anew at each use.
__device__ __forceinline__ uint32_t shared_address(const void* at) {
  auto address = static_cast<uint32_t>(__cvta_generic_to_shared(at));
  asm volatile("" : "+r"(address));
  return address;
}
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}
__device__ __forceinline__ void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

/// Threads of a row: a power of two of a warp's, or whole warps, which share memory. They sum
/// kCount numbers at once.
template <int kBlockThreads, int kCount>
class Lanes {
  static constexpr int kWarps = std::bit_ceil(kBlockThreads / 32u);
  static constexpr int kRows = kBlockThreads == kNormThreads ? 4 : 1;  // of two warps, or one row
  static constexpr int kGroup = 32 / kCount;  // lanes of a warp that end with one of the sums
  static constexpr uint32_t kBytes = sizeof(float[kCount][kRows][kWarps]);

 public:
  struct Shared {
    // Warps that a row does not have add zeros, which change no sum that began at one.
    alignas(2 * kBytes) float sums[2][kCount][kRows][kWarps];
  };

  /// Synchronises the block.
  __device__ explicit Lanes(Shared& shared) {
    const auto thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
    const auto threads = static_cast<int>(blockDim.x * blockDim.y);
    float* all = &shared.sums[0][0][0][0];
    for (int i = thread; i < 2 * kCount * kRows * kWarps; i += threads) all[i] = 0.f;
    __syncthreads();
    float* of_row = shared.sums[0][threadIdx.x % 32 / kGroup][threadIdx.y % kRows];
    of_row_ = shared_address(of_row);
    of_warp_ = shared_address(of_row + threadIdx.x / 32);
  }

  /// Each x becomes finish(its sum over a row's lanes), for all of them. All threads of the block
  /// take part. Sums are those of a butterfly over each warp's lanes, then of the warps in turn.
  template <typename Finish>
  __device__ void sum(float (&x)[kCount], const Finish& finish) {
    if (blockDim.x <= 32) {
#pragma unroll
      for (float& of_lane : x) {
        for (int lane = static_cast<int>(blockDim.x) / 2; lane > 0; lane /= 2) {
          of_lane += __shfl_xor_sync(kWholeWarp, of_lane, lane);
        }
        of_lane = finish(of_lane);
      }
      return;
    }
    const float of_warp = over_lanes<32>(x, [](float a, float b) { return a + b; });
    // Double-buffered: a buffer is reused only after the barrier that all its readers have passed.
    of_row_ ^= kBytes;
    of_warp_ ^= kBytes;
    if (threadIdx.x % kGroup == 0) store_shared(of_warp_, of_warp);
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; warp += 4) {
      const uint4 four = load_shared(of_row_ + warp * sizeof(float));
      total = total + __uint_as_float(four.x) + __uint_as_float(four.y) + __uint_as_float(four.z) +
              __uint_as_float(four.w);
    }
    total = finish(total);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = kCount == 1 ? total : __shfl_sync(kWholeWarp, total, i * kGroup);
    }
  }

 private:
  uint32_t of_row_;  // shared addresses
  uint32_t of_warp_;
};

/// A thread's columns: kNormVectors vectors of a row, some of which may lie beyond its last.
template <typename Value>
class Columns {
 public:
  __device__ explicit Columns(const NormTask& task) {
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      rows_[i] = first(i) < task.cols ? static_cast<int>(task.rows) : 0;
    }
  }

  /// The first column of the thread's vector i.
  __device__ static int first(int i) {
    return static_cast<int>(threadIdx.x) * Vector<Value>::kSize + from_first(i);
  }
  /// From its vector 0 to vector i.
  __device__ static int from_first(int i) {
    return i * static_cast<int>(blockDim.x) * Vector<Value>::kSize;
  }
  /// Whether vector i is one of a row's; and of this row's, which may lie beyond the last.
  __device__ bool has(int i) const { return rows_[i] > 0; }
  __device__ bool has(int i, int row) const { return row < rows_[i]; }

 private:
  int rows_[kNormVectors];
};

/// A thread's vectors of a row; zeros where there are none.
template <typename Value>
struct RowPart {
  Vector<Value> v[kNormVectors];

  RowPart() = default;
  /// `at` is the thread's vector 0.
  __device__ RowPart(const typename Value::Raw* at, int row, const Columns<Value>& columns) {
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      v[i] = {};
      if (columns.has(i, row)) v[i] = load_vector<Value>(at + columns.from_first(i));
    }
  }
  __device__ float value(int i, int k) const {
    return Value::load(v[i].word_of(k), k % Value::kPerWord);
  }
};

/// Parts of rows that are on their way into shared memory while others are worked on, which takes
/// no registers. A thread reads what it has asked for itself: nothing is to synchronise.
template <typename Value, int kParts, int kBlockThreads>
class RowsAhead {
 public:
  struct Shared {
    uint4 words[kParts][kNormVectors][kBlockThreads];
  };

  __device__ explicit RowsAhead(Shared& shared)
      : at_(shared_address(&shared.words[0][0][threadIdx.y * blockDim.x + threadIdx.x])) {}

  /// The thread's vectors of a row, the first at `from`, as part `part`; no longer those before.
  __device__ void ask(int part, const typename Value::Raw* from, int row,
                      const Columns<Value>& columns) {
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      const bool is_there = columns.has(i, row);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at_ + offset(part, i)),
                   "l"(is_there ? from + columns.from_first(i) : nullptr), "r"(is_there ? 16 : 0)
                   : "memory");
    }
  }
  /// Ends a group of what has been asked for.
  __device__ static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  /// Until all groups are there, but the last kLater.
  template <int kLater>
  __device__ static void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
  }
  __device__ RowPart<Value> get(int part) const {
    RowPart<Value> row;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      const uint4 words = load_shared(at_ + offset(part, i));
      row.v[i] = {{words.x, words.y, words.z, words.w}};
    }
    return row;
  }

 private:
  __device__ static constexpr uint32_t offset(int part, int i) {
    return (part * kNormVectors + i) * kBlockThreads * sizeof(uint4);
  }

  uint32_t at_;  // shared address of the thread's words
};

}  // namespace qshard::cuda
