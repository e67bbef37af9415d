// The noise of kernels/numerics/message_noise.h in registers.
#pragma once

#include <cuda_runtime.h>

#include "kernels/numerics/message_noise.h"

namespace qshard::cuda {

/// What rounds kNoiseValues values.
struct NoiseWords {
  uint32_t word[4];
  /// The noise of value i, a compile-time constant wherever loops are unrolled.
  __device__ __forceinline__ uint32_t of(int i) const { return noise_of_word(word[i / 4], i % 4); }
};

class MessageNoise {
 public:
  __device__ __forceinline__ explicit MessageNoise(const int32_t* rounding)
      : key_(philox_key(rounding)), count_(philox_count(rounding)) {}

  /// The noise of the values from kNoiseValues * counter on.
  __device__ __forceinline__ NoiseWords draw(uint64_t counter) const {
    uint32_t x[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), count_,
                     0};
    auto low = static_cast<uint32_t>(key_), high = static_cast<uint32_t>(key_ >> 32);
#pragma unroll
    for (int round = 0; round < kNoiseRounds; ++round) {
      const uint2 first = product(x[0], 0xD2511F53u), second = product(x[2], 0xCD9E8D57u);
      x[0] = second.y ^ x[1] ^ low;
      x[1] = second.x;
      x[2] = first.y ^ x[3] ^ high;
      x[3] = first.x;
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
    return {{x[0], x[1], x[2], x[3]}};
  }

 private:
  /// Both words, the low one first. (As a product of 64 bits it takes sums of zeros, too.)
  __device__ __forceinline__ static uint2 product(uint32_t a, uint32_t b) {
    uint2 words;
    asm("{.reg .u64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p;}"
        : "=r"(words.x), "=r"(words.y)
        : "r"(a), "r"(b));
    return words;
  }

  uint64_t key_;
  uint32_t count_;
};

}  // namespace qshard::cuda
