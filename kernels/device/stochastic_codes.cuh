// How kernels encode a vector of values with stochastic rounding: its random words, its codes.
#pragma once

#include <curand_philox4x32_x.h>

#include "kernels/device/vector_codes.cuh"
#include "kernels/numerics/random_words.h"

namespace qshard::cuda {

/// The random words of one task (kernels/numerics/random_words.h).
class RandomWords {
 public:
  __device__ __forceinline__ explicit RandomWords(const int32_t* rounding)
      : count_(philox_count(rounding)) {
    const uint64_t key = philox_key(rounding);
    key_ = make_uint2(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  }

  /// Those of the elements [first, first + kCount).
  template <int kCount>
  __device__ __forceinline__ void get(int64_t first, uint32_t (&words)[kCount]) const {
    static_assert(kCount % 4 == 0);
    const auto counter = static_cast<uint64_t>(first) / 4;
    const auto before = static_cast<int>(first % 4);  // words of the first counter not asked for
    uint32_t drawn[kCount + 4];
#pragma unroll
    for (int i = 0; i < kCount; i += 4) draw(counter + i / 4, drawn + i);
    if (before != 0) {
      draw(counter + kCount / 4, drawn + kCount);
      // In two steps of a fixed distance: registers have no computed index.
      if (before & 2) {
#pragma unroll
        for (int i = 0; i < kCount + 2; ++i) drawn[i] = drawn[i + 2];
      }
      if (before & 1) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) drawn[i] = drawn[i + 1];
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = drawn[i];
  }

 private:
  __device__ __forceinline__ void draw(uint64_t counter, uint32_t* words) const {
    const uint4 drawn = curand_Philox4x32_10(
        make_uint4(static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), count_, 0),
        key_);
    words[0] = drawn.x;
    words[1] = drawn.y;
    words[2] = drawn.z;
    words[3] = drawn.w;
  }

  uint2 key_;
  uint32_t count_;
};

/// Code of value i of a vector times its scale. Products of NaN lose its sign: it is the value's.
template <typename Code, typename Value, typename Scale>
__device__ __forceinline__ uint32_t encode_stochastic(const Vector<Value>& v, int i,
                                                      const Scale& scale, uint32_t random) {
  const float x = scaled(v, i, scale);
  const uint32_t sign = Value::sign_of_code(v.word_of(i), i % Value::kPerWord);
  if constexpr (std::is_same_v<Code, E2M1>) {
    return encode_e2m1_stochastic(x, random) | (sign >> 4);
  } else {
    return encode_e4m3_stochastic(x, random) | sign;
  }
}

/// Codes of the values times their scales, value i rounded by random[i].
template <typename Code, typename Value, typename Scale>
__device__ __forceinline__ VectorBytes<Code, Value> encode_vector_stochastic(
    const Vector<Value>& v, const Scale& scale, const uint32_t (&random)[Vector<Value>::kSize]) {
  constexpr int kBits = 8 / kCodesPerByte<Code>;
  uint32_t word[2] = {};
#pragma unroll
  for (int i = 0; i < Vector<Value>::kSize; ++i) {
    word[i * kBits / 32] |= encode_stochastic<Code>(v, i, scale, random[i]) << (i * kBits % 32);
  }
  if constexpr (sizeof(VectorBytes<Code, Value>) == 8) {
    return make_uint2(word[0], word[1]);
  } else {
    return static_cast<VectorBytes<Code, Value>>(word[0]);
  }
}

}  // namespace qshard::cuda
