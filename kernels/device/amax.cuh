// Largest magnitudes as fp32 bits, which order as the values do, NaN on top: of vectors, of a CUDA
// block, of all that raise an entry.
#pragma once

#include "kernels/device/value_types.cuh"

namespace qshard::cuda {

/// A word of the largest magnitudes of a thread's vectors: of those in each of its places.
template <typename Value, int kCount>
__device__ __forceinline__ uint32_t largest_word_of(const Vector<Value>* x) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (uint32_t word : x[i].word) largest = Value::max(largest, Value::magnitudes(word));
  }
  return largest;
}

/// The largest magnitude of a thread's vectors.
template <typename Value, int kCount>
__device__ __forceinline__ uint32_t largest_of(const Vector<Value>* x) {
  return Value::amax_bits(largest_word_of<Value, kCount>(x));
}

/// The largest of the bits of a CUDA block's threads, for all of them. Synchronises the block.
template <int kBlockThreads>
__device__ __forceinline__ uint32_t max_of_block(uint32_t bits) {
  __shared__ uint32_t of_warp[kBlockThreads / 32];
  bits = __reduce_max_sync(kWholeWarp, bits);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = bits;
  __syncthreads();
#pragma unroll
  for (uint32_t other : of_warp) bits = max(bits, other);
  return bits;
}

__device__ __forceinline__ void raise(float* amax, uint32_t bits) {
  atomicMax(reinterpret_cast<unsigned int*>(amax), canonical_amax(bits));
}

}  // namespace qshard::cuda
