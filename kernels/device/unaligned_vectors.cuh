// Vectors at any address: rows whose length is no multiple of 16 bytes, and views with an offset.
//
// Value by value a vector takes up to eight loads or stores. Instead whole aligned 16 bytes are
// moved, and shifted in registers: a load takes the two that hold the vector, a store the one that
// ends in it together with what the next lane has of it.
#pragma once

#include "kernels/device/vector_codes.cuh"

namespace qshard::cuda {

/// The four words from byte `bytes` (0 to 15, in whole values) of eight on.
template <typename Value>
__device__ __forceinline__ Vector<Value> words_from_byte(uint32_t (&w)[8], uint32_t bytes) {
  if (bytes & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
  if (bytes & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  }
  if constexpr (Value::kPerWord == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], 8 * (bytes & 2));
  }
  return {{w[0], w[1], w[2], w[3]}};
}

/// Whether load_shifted() of the vectors that begin at `first`, at `last` and between them stays in
/// a tensor of `rows` x `cols` values, and pays: four-byte values are read faster one by one.
template <typename Raw>
__device__ __forceinline__ bool can_load_shifted(const void* values, int64_t rows, int64_t cols,
                                                 const Raw* first, const Raw* last) {
  if (sizeof(Raw) == 4) return false;
  const auto begin = reinterpret_cast<uintptr_t>(values);
  const uintptr_t end = begin + rows * cols * sizeof(Raw);
  return (reinterpret_cast<uintptr_t>(first) & ~uintptr_t{15}) >= begin &&
         (reinterpret_cast<uintptr_t>(last) & ~uintptr_t{15}) + 32 <= end;
}

/// Reads the first `count` values from `from` on, at most a vector; zeros after them. No branches,
/// so that many of these are under way at once.
template <typename Value>
__device__ __forceinline__ Vector<Value> load_shifted(const typename Value::Raw* from, int count) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  const auto* aligned = reinterpret_cast<const uint4*>(address & ~uintptr_t{15});
  const uint4 low = __ldg(aligned);
  const uint4 high = __ldg(aligned + 1);
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  Vector<Value> v = words_from_byte<Value>(words, static_cast<uint32_t>(address & 15));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int in_word = count - i * Value::kPerWord;
    if (in_word < Value::kPerWord) v.word[i] &= in_word == 1 ? 0xffffu : 0u;
  }
  return v;
}

/// A vector made value by value, for those that hold a NaN: one(i) is value i.
template <typename Value, typename One>
__device__ __forceinline__ uint4 assemble(const One& one) {
  uint4 v = {};
#pragma unroll 1
  for (int i = Vector<Value>::kSize - 1; i >= 0; --i) {
    constexpr int kBits = 8 * sizeof(typename Value::Raw);
    v.w = __funnelshift_lc(v.z, v.w, kBits);
    v.z = __funnelshift_lc(v.y, v.z, kBits);
    v.y = __funnelshift_lc(v.x, v.y, kBits);
    v.x = __funnelshift_lc(0, v.x, kBits) | one(i);
  }
  return v;
}

/// Writes the first `count` values of each lane's vector, all of it where there are more. The
/// vectors of kLanes lanes follow one another, and only the last that has values may have fewer
/// than a vector. All lanes of a warp take part.
template <typename Value, int kLanes>
__device__ __forceinline__ void store_unaligned(typename Value::Raw* to, int count, uint4 v) {
  using Raw = typename Value::Raw;
  constexpr int kSize = Vector<Value>::kSize;
  const bool is_first = threadIdx.x % kLanes == 0;
  const bool is_last = threadIdx.x % kLanes == kLanes - 1;
  const auto next = [](auto x) { return __shfl_down_sync(kWholeWarp, x, 1, kLanes); };
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  uint32_t both[8] = {v.x, v.y, v.z, v.w, next(v.x), next(v.y), next(v.z), next(v.w)};
  const int next_count = next(count);
  // The first `head` values lie in the previous lane's last 16 aligned bytes.
  const auto offset = static_cast<int>(reinterpret_cast<uintptr_t>(to) & 15);
  const int head = (16 - offset) % 16 / static_cast<int>(sizeof(Raw));
  const bool fills_own = count >= kSize && (head == 0 || (!is_last && next_count >= head));
  const bool is_in_previous = !is_first && count >= head;
  if (fills_own) {
    const uint32_t bytes = static_cast<uint32_t>(head) * sizeof(Raw);
    const Vector<Value> own = words_from_byte<Value>(both, bytes);
    store_bytes(to + head, make_uint4(own.word[0], own.word[1], own.word[2], own.word[3]));
  }
  if (fills_own && is_in_previous) return;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const bool is_written = i < head ? is_in_previous : fills_own;
    if (i < count && !is_written) {
      to[i] = static_cast<Raw>(words[i / Value::kPerWord] >> (16 * (i % Value::kPerWord)));
    }
  }
}

}  // namespace qshard::cuda
