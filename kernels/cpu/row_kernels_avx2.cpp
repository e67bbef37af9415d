// AVX2 + F16C inner loops. The file is built without -mavx2: each function names its target, so the
// library still loads on a CPU without AVX2. FMA stays off, or x * scale could be contracted into
// the rounding that follows it.
#include "kernels/cpu/row_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include <cstring>

#include "kernels/numerics/float8.h"

#define QSHARD_AVX2 __attribute__((target("avx2,f16c")))
#define QSHARD_AVX2_INLINE __attribute__((target("avx2,f16c"), always_inline)) inline

namespace qshard::cpu {
namespace {

constexpr int64_t kStep = 32;  // elements per iteration: one 32-byte store of codes

QSHARD_AVX2_INLINE __m256i splat(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }

struct Float32 {
  using Storage = float;
  QSHARD_AVX2_INLINE static __m256 load(const float* x) { return _mm256_loadu_ps(x); }
  QSHARD_AVX2_INLINE static void store(float* x, __m256 v) { _mm256_storeu_ps(x, v); }
};

struct BFloat16 {
  using Storage = uint16_t;
  QSHARD_AVX2_INLINE static __m256 load(const uint16_t* x) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  // decode() makes only NaNs whose low bits are clear, which rounding leaves as they are.
  QSHARD_AVX2_INLINE static void store(uint16_t* x, __m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), splat(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, splat(0x7fff)));
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    const __m256i packed = _mm256_packus_epi32(high, high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x),
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
  }
};

struct Float16 {
  using Storage = uint16_t;
  QSHARD_AVX2_INLINE static __m256 load(const uint16_t* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  QSHARD_AVX2_INLINE static void store(uint16_t* x, __m256 v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

QSHARD_AVX2_INLINE uint32_t reduce_max_epu32(__m256i v) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

QSHARD_AVX2 uint32_t amax_float32(const void* values, int64_t n) {
  const auto* x = static_cast<const float*>(values);
  const __m256i mask = splat(kAbsMask);
  __m256i best[4] = {};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    for (int j = 0; j < 4; ++j) {
      const __m256i v = _mm256_castps_si256(_mm256_loadu_ps(x + i + 8 * j));
      best[j] = _mm256_max_epu32(best[j], _mm256_and_si256(v, mask));
    }
  }
  uint32_t largest = reduce_max_epu32(
      _mm256_max_epu32(_mm256_max_epu32(best[0], best[1]), _mm256_max_epu32(best[2], best[3])));
  for (; i < n; ++i) {
    const uint32_t abs = float_bits(x[i]) & kAbsMask;
    largest = abs > largest ? abs : largest;
  }
  return canonical_amax(largest);
}

// Both 16-bit types order by their magnitude bits, NaN on top, so only the maximum is converted.
QSHARD_AVX2_INLINE uint16_t amax_16bit(const void* values, int64_t n) {
  const auto* x = static_cast<const uint16_t*>(values);
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  __m256i best[2] = {};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    for (int j = 0; j < 2; ++j) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 16 * j));
      best[j] = _mm256_max_epu16(best[j], _mm256_and_si256(v, mask));
    }
  }
  const __m256i v = _mm256_max_epu16(best[0], best[1]);
  const __m128i m = _mm_max_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  // phminposuw finds a minimum; the maximum is the complement's.
  const __m128i ones = _mm_set1_epi16(-1);
  auto largest =
      static_cast<uint16_t>(~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(m, ones)), 0));
  for (; i < n; ++i) {
    const auto abs = static_cast<uint16_t>(x[i] & 0x7fff);
    largest = abs > largest ? abs : largest;
  }
  return largest;
}

QSHARD_AVX2 uint32_t amax_bfloat16(const void* values, int64_t n) {
  return canonical_amax(float_bits(bfloat16_to_float(amax_16bit(values, n))));
}

QSHARD_AVX2 uint32_t amax_float16(const void* values, int64_t n) {
  return canonical_amax(float_bits(half_to_float(amax_16bit(values, n))));
}

template <typename Value>
QSHARD_AVX2 void fold_amax(const void* values, int64_t n, uint32_t* largest) {
  using Storage = typename Value::Storage;
  const auto* x = static_cast<const Storage*>(values);
  const __m256i mask = splat(kAbsMask);
  const auto fold8 = [&](const Storage* from, uint32_t* to) QSHARD_AVX2 {
    auto* target = reinterpret_cast<__m256i*>(to);
    const __m256i abs = _mm256_and_si256(_mm256_castps_si256(Value::load(from)), mask);
    _mm256_storeu_si256(target, _mm256_max_epu32(_mm256_loadu_si256(target), abs));
  };
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) fold8(x + i, largest + i);
  if (i == n) return;
  Storage tail[8] = {};
  uint32_t tail_largest[8] = {};
  std::memcpy(tail, x + i, (n - i) * sizeof(Storage));
  std::memcpy(tail_largest, largest + i, (n - i) * sizeof(uint32_t));
  fold8(tail, tail_largest);
  std::memcpy(largest + i, tail_largest, (n - i) * sizeof(uint32_t));
}

// Eight E4M3 codes in 32-bit lanes; see encode_float8 for the arithmetic.
QSHARD_AVX2_INLINE __m256i encode8(__m256 v) {
  constexpr uint32_t kMagic = 141u << 23;      // 2^14: its ulp is the smallest subnormal, 2^-9
  constexpr uint32_t kMinNormal = 121u << 23;  // 2^-6
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), splat(0x80));
  const __m256i magnitude = _mm256_and_si256(bits, splat(kAbsMask));
  const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, splat(kInfBits));
  const __m256i abs = _mm256_min_epu32(magnitude, splat(0x43e00000));  // 448
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(abs, 20), splat(1));
  const __m256i normal = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(abs, odd), splat(0x7ffffu - (120u << 23))), 20);
  const __m256 shifted =
      _mm256_add_ps(_mm256_castsi256_ps(abs), _mm256_castsi256_ps(splat(kMagic)));
  const __m256i subnormal = _mm256_sub_epi32(_mm256_castps_si256(shifted), splat(kMagic));
  const __m256i is_subnormal = _mm256_cmpgt_epi32(splat(kMinNormal), abs);
  const __m256i code = _mm256_blendv_epi8(normal, subnormal, is_subnormal);
  // A NaN was clamped to 0x7e; the mask is -1 there and makes it 0x7f.
  return _mm256_or_si256(_mm256_sub_epi32(code, is_nan), sign);
}

template <typename Value>
QSHARD_AVX2_INLINE void encode32(const typename Value::Storage* x, __m256 scale, uint8_t* codes) {
  const __m256i a = encode8(_mm256_mul_ps(Value::load(x), scale));
  const __m256i b = encode8(_mm256_mul_ps(Value::load(x + 8), scale));
  const __m256i c = encode8(_mm256_mul_ps(Value::load(x + 16), scale));
  const __m256i d = encode8(_mm256_mul_ps(Value::load(x + 24), scale));
  // The packs work within 128-bit lanes; the permutation puts the groups of four back in order.
  const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                      _mm256_permutevar8x32_epi32(packed, order));
}

template <typename Value>
QSHARD_AVX2 void encode(const void* values, int64_t n, float scale, uint8_t* codes) {
  using Storage = typename Value::Storage;
  const auto* x = static_cast<const Storage*>(values);
  const __m256 scales = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) encode32<Value>(x + i, scales, codes + i);
  if (i == n) return;
  Storage tail[kStep] = {};
  uint8_t tail_codes[kStep];
  std::memcpy(tail, x + i, (n - i) * sizeof(Storage));
  encode32<Value>(tail, scales, tail_codes);
  std::memcpy(codes + i, tail_codes, n - i);
}

template <typename Value>
QSHARD_AVX2_INLINE void decode16(const uint8_t* codes, __m256 scale_inv,
                                 typename Value::Storage* x) {
  const __m256i code =
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_sub_epi16(code, magnitude), 8);
  // An E4M3 code shifted left by 7 is the fp16 of value * 2^-8, subnormals included; NaN would be
  // the number 0x3f80 and is lifted to 0x7e00.
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i lifted = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 7),
                                          _mm256_and_si256(is_nan, _mm256_set1_epi16(0x3e80)));
  const __m256i half = _mm256_or_si256(lifted, sign);
  const __m256 exponent = _mm256_set1_ps(256.f);
  const __m256 low = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), exponent);
  const __m256 high = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), exponent);
  Value::store(x, _mm256_mul_ps(low, scale_inv));
  Value::store(x + 8, _mm256_mul_ps(high, scale_inv));
}

template <typename Value>
QSHARD_AVX2 void decode(const uint8_t* codes, int64_t n, float scale_inv, void* values) {
  using Storage = typename Value::Storage;
  auto* x = static_cast<Storage*>(values);
  const __m256 scales = _mm256_set1_ps(canonical_nan(scale_inv));
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) decode16<Value>(codes + i, scales, x + i);
  if (i == n) return;
  uint8_t tail_codes[16] = {};
  Storage tail[16];
  std::memcpy(tail_codes, codes + i, n - i);
  decode16<Value>(tail_codes, scales, tail);
  std::memcpy(x + i, tail, (n - i) * sizeof(Storage));
}

// Eight E2M1 codes in 32-bit lanes: a code counts the midpoints below its value. A tie goes to the
// even code, so every second midpoint counts only what is above it. NaN is above all.
QSHARD_AVX2_INLINE __m256i encode_fp4_8(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 28), splat(8));
  const __m256i abs = _mm256_and_si256(bits, splat(kAbsMask));
  constexpr uint32_t kLargestBelow[7] = {0x3e800000, 0x3f3fffff, 0x3fa00000, 0x3fdfffff,
                                         0x40200000, 0x405fffff, 0x40a00000};
  __m256i code = sign;
  for (const uint32_t midpoint : kLargestBelow) {
    code = _mm256_sub_epi32(code, _mm256_cmpgt_epi32(abs, splat(midpoint)));
  }
  return code;
}

/// 16 values to 8 bytes.
template <typename Value>
QSHARD_AVX2_INLINE void encode_fp4_16(const typename Value::Storage* x, __m256 scale,
                                      uint8_t* codes) {
  const __m256i a = encode_fp4_8(_mm256_mul_ps(Value::load(x), scale));
  const __m256i b = encode_fp4_8(_mm256_mul_ps(Value::load(x + 8), scale));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));  // low + 16 * high
  _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(pairs, pairs));
}

template <typename Value>
QSHARD_AVX2 void encode_fp4(const void* values, int64_t n, float scale, uint8_t* codes) {
  using Storage = typename Value::Storage;
  const auto* x = static_cast<const Storage*>(values);
  const __m256 scales = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) encode_fp4_16<Value>(x + i, scales, codes + i / 2);
  if (i == n) return;
  Storage tail[16] = {};
  uint8_t tail_codes[8];
  std::memcpy(tail, x + i, (n - i) * sizeof(Storage));
  encode_fp4_16<Value>(tail, scales, tail_codes);
  std::memcpy(codes + i / 2, tail_codes, (n - i + 1) / 2);
}

template <typename Value>
QSHARD_AVX2_INLINE void decode_fp4_16(const uint8_t* codes, __m256 scale_inv,
                                      typename Value::Storage* x) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(0x0f));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(0x0f));
  const __m128i nibbles = _mm_unpacklo_epi8(low, high);
  // Twice the magnitude of each code; the sign is set apart, so that a negative zero keeps it.
  const __m128i twice =
      _mm_shuffle_epi8(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, 1, 2, 3, 4, 6, 8, 12), nibbles);
  const __m128i signs = _mm_and_si128(nibbles, _mm_set1_epi8(8));
  const auto decode8 = [&](__m128i magnitude, __m128i sign) QSHARD_AVX2 {
    const __m256 value =
        _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(magnitude)), _mm256_set1_ps(0.5f));
    const __m256i sign_bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(sign), 28);
    return _mm256_mul_ps(_mm256_or_ps(value, _mm256_castsi256_ps(sign_bits)), scale_inv);
  };
  Value::store(x, decode8(twice, signs));
  Value::store(x + 8, decode8(_mm_srli_si128(twice, 8), _mm_srli_si128(signs, 8)));
}

template <typename Value>
QSHARD_AVX2 void decode_fp4(const uint8_t* codes, int64_t n, float scale_inv, void* values) {
  using Storage = typename Value::Storage;
  auto* x = static_cast<Storage*>(values);
  const __m256 scales = _mm256_set1_ps(canonical_nan(scale_inv));
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) decode_fp4_16<Value>(codes + i / 2, scales, x + i);
  if (i == n) return;
  uint8_t tail_codes[8] = {};
  Storage tail[16];
  std::memcpy(tail_codes, codes + i / 2, (n - i + 1) / 2);
  decode_fp4_16<Value>(tail_codes, scales, tail);
  std::memcpy(x + i, tail, (n - i) * sizeof(Storage));
}

}  // namespace

const RowKernels* avx2_row_kernels() {
  static constexpr RowKernels kernels{
      {amax_float32, amax_bfloat16, amax_float16},
      {fold_amax<Float32>, fold_amax<BFloat16>, fold_amax<Float16>},
      {encode<Float32>, encode<BFloat16>, encode<Float16>},
      {decode<Float32>, decode<BFloat16>, decode<Float16>},
      {encode_fp4<Float32>, encode_fp4<BFloat16>, encode_fp4<Float16>},
      {decode_fp4<Float32>, decode_fp4<BFloat16>, decode_fp4<Float16>}};
  static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return supported ? &kernels : nullptr;
}

}  // namespace qshard::cpu

#else

namespace qshard::cpu {

const RowKernels* avx2_row_kernels() { return nullptr; }

}  // namespace qshard::cpu

#endif
