// How kernels encode and decode a vector of values with one scale: FP8 four codes to a word, E2M1,
// and products stored in pairs.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "kernels/device/value_types.cuh"
#include "kernels/numerics/row_scales.h"

namespace qshard::cuda {

template <typename T>
__device__ __forceinline__ uint32_t word_bits(T pair) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

template <typename T>
__device__ __forceinline__ T word_as(uint32_t bits) {
  static_assert(sizeof(T) == 4);
  T pair;
  memcpy(&pair, &bits, 4);
  return pair;
}

/// What is read and written at once.
template <int kSize>
struct BytesType;
template <>
struct BytesType<1> {
  using Type = uint8_t;
};
template <>
struct BytesType<2> {
  using Type = uint16_t;
};
template <>
struct BytesType<4> {
  using Type = uint32_t;
};
template <>
struct BytesType<8> {
  using Type = uint2;
};
template <>
struct BytesType<16> {
  using Type = uint4;
};
template <int kSize>
using Bytes = typename BytesType<kSize>::Type;

/// In one store: those of uint2 and uint4 the compiler may split when it has moved their parts.
template <typename T>
__device__ __forceinline__ void store_bytes(void* at, T bytes) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(bytes.x), "r"(bytes.y),
                 "r"(bytes.z), "r"(bytes.w)
                 : "memory");
    return;
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(bytes.x), "r"(bytes.y)
                 : "memory");
    return;
  }
#endif
  *static_cast<T*>(at) = bytes;
}

/// Codes as they lie in the image: E2M1 two to a byte, the first in the low nibble.
struct E2M1 {};
template <typename Code>
constexpr int kCodesPerByte = std::is_same_v<Code, E2M1> ? 2 : 1;
template <typename Code, typename Value>
using VectorBytes = Bytes<Vector<Value>::kSize / kCodesPerByte<Code>>;

/// What the values of a vector are multiplied by where they share no scale.
template <typename Value>
struct ScaleOfEach {
  float scale[Vector<Value>::kSize];
};

// `Scale` is float, or ScaleOfEach<Value>.
__device__ __forceinline__ float scale_of(float scale, int) { return scale; }
template <typename Value>
__device__ __forceinline__ float scale_of(const ScaleOfEach<Value>& each, int i) {
  return each.scale[i];
}

/// Value i of a vector times its scale.
template <typename Value, typename Scale>
__device__ __forceinline__ float scaled(const Vector<Value>& v, int i, const Scale& scale) {
  return __fmul_rn(Value::load(v.word_of(i), i % Value::kPerWord), scale_of(scale, i));
}

/// The bytes that hold the signs of the values [i, i + 4).
template <typename Value>
__device__ __forceinline__ uint32_t sign_bytes(const Vector<Value>& v, int i) {
  if constexpr (Value::kPerWord == 1) {
    return __byte_perm(__byte_perm(v.word[0], v.word[1], 0x0073),
                       __byte_perm(v.word[2], v.word[3], 0x0073), 0x5410);
  } else {
    return __byte_perm(v.word_of(i), v.word_of(i + 2), 0x7531);
  }
}

/// FP8 codes of the values [i, i + 4).
template <typename Code, bool kMayBeNaN, typename Value, typename Scale>
__device__ __forceinline__ uint32_t fp8_word(const Vector<Value>& v, int i, const Scale& scale) {
  const auto pair = [&](int k) {
    return unsigned_nan_pair<Code>(scaled(v, k, scale), scaled(v, k + 1, scale));
  };
  const uint32_t codes = word_bits(make_ushort2(pair(i), pair(i + 2)));
  return kMayBeNaN ? codes | (sign_bytes(v, i) & 0x80808080u) : codes;
}

/// |x| rounded to two significant bits, or to a multiple of 0.5 below 1, to nearest even: what
/// encode_e2m1 does but for its cap. NaN stays, and what overflows may become NaN.
__device__ __forceinline__ float round_e2m1(float x) {
  // Veltkamp's split, at the binade of 1 for all that lies below 1.5.
  x = fabsf(x);
  const float high = __fmaf_rn(fmaxf(x, 1.5f), 0x1p22f, x);
  return __fsub_rn(high, __fsub_rn(high, x));
}

/// E2M1 codes of the values i and i + 1 in bits 12 to 15 and 28 to 31.
template <typename Value>
__device__ __forceinline__ uint32_t e2m1_pair(const Vector<Value>& v, int i, float scale) {
  const __half2 rounded =
      __floats2half2_rn(round_e2m1(scaled(v, i, scale)), round_e2m1(scaled(v, i + 1, scale)));
  const __half2 capped = __hmin2(rounded, __float2half2_rn(kE2M1Max));  // NaN is 6, too
  // Times 2^-14 an fp16 has the code above its other mantissa bits, subnormals included.
  const uint32_t codes = word_bits(__hmul2(capped, __float2half2_rn(0x1p-14f)));
  const uint32_t signs =
      Value::kPerWord == 2 ? v.word_of(i) : __byte_perm(v.word_of(i), v.word_of(i + 1), 0x7632);
  return (codes << 3) | (signs & 0x80008000u);
}

/// Codes of the values times their scales, rounded twice as on every path. `kMayBeNaN`: without,
/// FP8 codes cost a quarter less.
template <typename Code, bool kMayBeNaN = true, typename Value, typename Scale>
__device__ __forceinline__ VectorBytes<Code, Value> encode_vector(const Vector<Value>& v,
                                                                  const Scale& scale) {
  if constexpr (!std::is_same_v<Code, E2M1>) {
    if constexpr (Vector<Value>::kSize == 8) {
      return make_uint2(fp8_word<Code, kMayBeNaN>(v, 0, scale),
                        fp8_word<Code, kMayBeNaN>(v, 4, scale));
    } else {
      return fp8_word<Code, kMayBeNaN>(v, 0, scale);
    }
  } else {
    // Bytes of the even codes in the low half, of the odd ones in the high half.
    const uint32_t first = __byte_perm(e2m1_pair(v, 0, scale), e2m1_pair(v, 2, scale), 0x7351);
    if constexpr (Vector<Value>::kSize == 8) {
      const uint32_t second = __byte_perm(e2m1_pair(v, 4, scale), e2m1_pair(v, 6, scale), 0x7351);
      return __byte_perm(first, second, 0x7632) | (__byte_perm(first, second, 0x5410) >> 4);
    } else {
      return static_cast<uint16_t>((first >> 16) | ((first & 0xffffu) >> 4));
    }
  }
}

/// The word with byte i of codes.
__device__ __forceinline__ uint32_t word_at(uint2 codes, int i) {
  return i < 4 ? codes.x : codes.y;
}
__device__ __forceinline__ uint32_t word_at(uint32_t codes, int) { return codes; }

/// The exact values of codes that are not NaN.
template <typename Code, typename Value>
__device__ __forceinline__ void decode_codes(VectorBytes<Code, Value> codes,
                                             float (&x)[Vector<Value>::kSize]) {
  constexpr int kSize = Vector<Value>::kSize;
  if constexpr (std::is_same_v<Code, E4M3>) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const auto pair = static_cast<__nv_fp8x2_storage_t>(word_at(codes, i) >> (8 * (i % 4)));
      const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      x[i] = values.x;
      x[i + 1] = values.y;
    }
  } else if constexpr (std::is_same_v<Code, E5M2>) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      // A code is the high byte of its fp16.
      const uint32_t pair = __byte_perm(word_at(codes, i), 0, i % 4 == 0 ? 0x1404 : 0x3424);
      const float2 values = __half22float2(word_as<__half2>(pair));
      x[i] = values.x;
      x[i + 1] = values.y;
    }
  } else {
    // Code i lies 16 bits below code i + kSize / 2, as two fp16 do; there a code followed by nine
    // zero bits is the fp16 of its value times 2^-14.
    const uint32_t halves = kSize == 8 ? codes : __byte_perm(codes, 0, 0x4140);
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      const uint32_t code = halves >> (4 * i);
      const uint32_t half = ((code & 0x00070007u) << 9) | ((code & 0x00080008u) << 12);
      const float2 values =
          __half22float2(__hmul2(word_as<__half2>(half), __float2half2_rn(0x1p14f)));
      x[i] = values.x;
      x[i + kSize / 2] = values.y;
    }
  }
}

/// Value bits of two products, neither of them NaN.
__device__ __forceinline__ uint32_t store2(BFloat16, float x, float y) {
  return word_bits(__floats2bfloat162_rn(x, y));
}
__device__ __forceinline__ uint32_t store2(Float16, float x, float y) {
  return word_bits(__floats2half2_rn(x, y));
}

/// A word of values, rounded; NaN is any NaN.
template <typename Value>
__device__ __forceinline__ uint32_t word_of_values(const float* x) {
  if constexpr (Value::kPerWord == 2) {
    return store2(Value{}, x[0], x[1]);
  } else {
    return Value::store(x[0]);
  }
}

/// A vector of them.
template <typename Value>
__device__ __forceinline__ uint4 round_values(const float (&x)[Vector<Value>::kSize]) {
  constexpr int kPerWord = Value::kPerWord;
  return make_uint4(word_of_values<Value>(x), word_of_values<Value>(x + kPerWord),
                    word_of_values<Value>(x + 2 * kPerWord),
                    word_of_values<Value>(x + 3 * kPerWord));
}

/// Values of a vector's codes, none of them NaN.
template <typename Code, typename Value>
__device__ __forceinline__ uint4 decode_vector(VectorBytes<Code, Value> codes, float scale_inv) {
  constexpr int kSize = Vector<Value>::kSize;
  float x[kSize];
  decode_codes<Code, Value>(codes, x);
#pragma unroll
  for (int i = 0; i < kSize; ++i) x[i] = __fmul_rn(x[i], scale_inv);
  return round_values<Value>(x);
}

/// Value i of a vector's codes: a NaN scale's is positive, a NaN code's keeps its sign.
template <typename Code, typename Value>
__device__ __forceinline__ typename Value::Raw decode_one(VectorBytes<Code, Value> codes, int i,
                                                          float scale_inv) {
  if (scale_inv != scale_inv) return Value::store(__uint_as_float(kNaNBits));
  const uint32_t word = word_at(codes, i);
  if constexpr (std::is_same_v<Code, E4M3>) {
    return Value::store(decode_e4m3_scaled((word >> (8 * (i % 4))) & 0xffu, scale_inv));
  } else {
    const auto code = static_cast<uint8_t>((word >> (4 * i)) & 0xfu);
    return Value::store(__fmul_rn(decode_e2m1(code), scale_inv));
  }
}

template <typename Code, typename Value>
__device__ __forceinline__ bool has_nan(VectorBytes<Code, Value> codes) {
  if constexpr (!std::is_same_v<Code, E2M1>) {
    // From the first NaN's magnitude on a sum has its highest bit.
    constexpr uint32_t kToNaN = std::is_same_v<Code, E4M3> ? 0x01010101u : 0x03030303u;
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < Vector<Value>::kSize; i += 4) {
      found |= (word_at(codes, i) & 0x7f7f7f7fu) + kToNaN;
    }
    return (found & 0x80808080u) != 0;
  }
  return false;
}

}  // namespace qshard::cuda
