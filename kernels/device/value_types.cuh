// How kernels read, write and encode each value type. `Raw` is what lies in memory: kernels keep it
// in registers and convert late.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/format/formats.h"
#include "kernels/numerics/float8.h"

namespace qshard::cuda {

constexpr uint32_t kWholeWarp = 0xffffffffu;  // of shuffles, votes and reductions

/// A 32-bit word holds kPerWord values, the first in its low bits. `i` is a compile-time constant
/// wherever it matters: loops over it are unrolled.
struct Float32 {
  using Raw = uint32_t;
  static constexpr int kPerWord = 1;
  __device__ static float load(uint32_t word, int) { return __uint_as_float(word); }
  __device__ static Raw store(float x) { return __float_as_uint(x); }
  __device__ static uint32_t sign_of_code(uint32_t word, int) { return (word >> 24) & 0x80u; }
  // Magnitudes order as the values do, NaN on top, so maxima need no conversion.
  __device__ static uint32_t magnitudes(uint32_t word) { return word & kAbsMask; }
  __device__ static uint32_t max(uint32_t a, uint32_t b) { return ::max(a, b); }
  /// fp32 bits of one magnitude, and of the larger of a word's.
  __device__ static uint32_t amax_bits(uint32_t word, int) { return word; }
  __device__ static uint32_t amax_bits(uint32_t word) { return word; }
};

struct SixteenBits {
  using Raw = uint16_t;
  static constexpr int kPerWord = 2;
  __device__ static uint32_t sign_of_code(uint32_t word, int i) {
    return (word >> (8 + 16 * i)) & 0x80u;
  }
  __device__ static uint32_t magnitudes(uint32_t word) { return word & 0x7fff7fffu; }
  __device__ static uint32_t max(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
};

struct BFloat16 : SixteenBits {
  __device__ static float load(uint32_t word, int i) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
  }
  __device__ static Raw store(float x) { return float_to_bfloat16(x); }
  __device__ static uint32_t amax_bits(uint32_t word, int i) {
    return __float_as_uint(load(word, i));
  }
  __device__ static uint32_t amax_bits(uint32_t word) {
    return ::max(amax_bits(word, 0), amax_bits(word, 1));
  }
};

struct Float16 : SixteenBits {
  __device__ static float load(uint32_t word, int i) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> (16 * i))));
  }
  __device__ static Raw store(float x) {
    // The conversion drops the sign of a NaN.
    const uint32_t bits = __float_as_uint(x);
    if ((bits & kAbsMask) > kInfBits) return float_to_half(x);
    return __half_as_ushort(__float2half_rn(x));
  }
  __device__ static uint32_t amax_bits(uint32_t word, int i) {
    return __float_as_uint(load(word, i));
  }
  __device__ static uint32_t amax_bits(uint32_t word) {
    return ::max(amax_bits(word, 0), amax_bits(word, 1));
  }
};

/// 16 bytes of values.
template <typename Value>
struct alignas(16) Vector {
  static constexpr int kSize = 4 * Value::kPerWord;
  uint32_t word[4];

  __device__ uint32_t word_of(int i) const { return word[i / Value::kPerWord]; }
};

/// Reads 16 bytes that no thread of this kernel writes, so that loads may move ahead of stores.
template <typename Value>
__device__ __forceinline__ Vector<Value> load_vector(const typename Value::Raw* values) {
  const uint4 bits = __ldg(reinterpret_cast<const uint4*>(values));
  return {{bits.x, bits.y, bits.z, bits.w}};
}

/// The first `count` values, at most a vector; zeros after them.
template <typename Value>
__device__ __forceinline__ Vector<Value> load_some(const typename Value::Raw* values, int count) {
  Vector<Value> v = {};
#pragma unroll
  for (int i = 0; i < Vector<Value>::kSize; ++i) {
    if (i < count) {
      const uint32_t raw = values[i];
      v.word[i / Value::kPerWord] |= raw << (16 * (i % Value::kPerWord));
    }
  }
  return v;
}

struct E4M3 {
  static constexpr float kMax = kE4M3Max;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  static constexpr __nv_fp8_interpretation_t kInterpretation = __NV_E4M3;
#endif
  __device__ static uint32_t encode_portable(float x) { return encode_e4m3(x); }
};

struct E5M2 {
  static constexpr float kMax = kE5M2Max;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  static constexpr __nv_fp8_interpretation_t kInterpretation = __NV_E5M2;
#endif
  __device__ static uint32_t encode_portable(float x) { return encode_e5m2(x); }
};

/// Codes of two products, the first in the low byte. A NaN has lost its sign in the product:
/// callers put it back.
template <typename Code>
__device__ __forceinline__ uint16_t unsigned_nan_pair(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, Code::kInterpretation);
#else
  return static_cast<uint16_t>(Code::encode_portable(x) | (Code::encode_portable(y) << 8));
#endif
}

/// Codes of value i of each of four words, times one scale.
template <typename Code, bool kMayBeNaN, typename Value>
__device__ __forceinline__ uint32_t encode4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int i,
                                            float scale) {
  const auto product = [&](uint32_t word) { return __fmul_rn(Value::load(word, i), scale); };
  const uint32_t low = unsigned_nan_pair<Code>(product(a), product(b));
  const uint32_t high = unsigned_nan_pair<Code>(product(c), product(d));
  if constexpr (!kMayBeNaN) return low | (high << 16);
  const int sign_bytes = Value::kPerWord == 2 && i == 0 ? 0x0051 : 0x0073;
  const uint32_t signs =
      __byte_perm(__byte_perm(a, b, sign_bytes), __byte_perm(c, d, sign_bytes), 0x5410);
  return low | (high << 16) | (signs & 0x80808080u);
}

/// value of an E4M3 code times scale_inv; NaN keeps its sign.
__device__ __forceinline__ float decode_e4m3_scaled(uint32_t code, float scale_inv) {
  const uint32_t magnitude = code & 0x7fu;
  // Shifted left by 7 the code is the fp16 of value * 2^-8, subnormals included.
  const uint32_t half = ((code & 0x80u) << 8) | (magnitude << 7);
  const float value = __half2float(__ushort_as_half(static_cast<uint16_t>(half))) * 256.f;
  const float scaled = __fmul_rn(value, scale_inv);
  return magnitude == 0x7fu ? __uint_as_float(kNaNBits | ((code & 0x80u) << 24)) : scaled;
}

/// Calls run(Value{}) with the type of `dtype`.
template <typename Run>
cudaError_t with_value_type(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kFloat32:
      return run(Float32{});
    case DType::kBFloat16:
      return run(BFloat16{});
    case DType::kFloat16:
      return run(Float16{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace qshard::cuda
