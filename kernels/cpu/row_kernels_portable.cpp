#include <ATen/core/PhiloxRNGEngine.h>

#include "kernels/cpu/message_noise.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/numerics/row_scales.h"

namespace qshard::cpu {
namespace {

// How each value type is read and written; `Storage` is what lies in memory.
struct Float32 {
  using Storage = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};
struct BFloat16 {
  using Storage = uint16_t;
  static float load(uint16_t x) { return bfloat16_to_float(x); }
  static uint16_t store(float x) { return float_to_bfloat16(x); }
};
struct Float16 {
  using Storage = uint16_t;
  static float load(uint16_t x) { return half_to_float(x); }
  static uint16_t store(float x) { return float_to_half(x); }
};

template <typename Value>
uint32_t amax(const void* values, int64_t n) {
  const auto* x = static_cast<const typename Value::Storage*>(values);
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t abs = float_bits(Value::load(x[i])) & kAbsMask;
    largest = abs > largest ? abs : largest;
  }
  return canonical_amax(largest);
}

template <typename Value>
void fold_amax(const void* values, int64_t n, uint32_t* largest) {
  const auto* x = static_cast<const typename Value::Storage*>(values);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t abs = float_bits(Value::load(x[i])) & kAbsMask;
    largest[i] = abs > largest[i] ? abs : largest[i];
  }
}

template <typename Value>
void encode(const void* values, int64_t n, float scale, uint8_t* codes) {
  const auto* x = static_cast<const typename Value::Storage*>(values);
  for (int64_t i = 0; i < n; ++i) codes[i] = encode_e4m3(Value::load(x[i]) * scale);
}

template <typename Value>
void decode(const uint8_t* codes, int64_t n, float scale_inv, void* values) {
  auto* x = static_cast<typename Value::Storage*>(values);
  scale_inv = canonical_nan(scale_inv);
  for (int64_t i = 0; i < n; ++i) x[i] = Value::store(decode_e4m3(codes[i]) * scale_inv);
}

template <typename Value>
void encode_e5m2_codes(const void* values, int64_t n, float scale, uint8_t* codes) {
  const auto* x = static_cast<const typename Value::Storage*>(values);
  for (int64_t i = 0; i < n; ++i) codes[i] = encode_e5m2(Value::load(x[i]) * scale);
}

template <typename Value>
void decode_e5m2_codes(const uint8_t* codes, int64_t n, float scale_inv, void* values) {
  auto* x = static_cast<typename Value::Storage*>(values);
  for (int64_t i = 0; i < n; ++i) x[i] = Value::store(decode_e5m2(codes[i]) * scale_inv);
}

template <typename Value>
void encode_fp4(const void* values, int64_t n, float scale, uint8_t* codes) {
  const auto* x = static_cast<const typename Value::Storage*>(values);
  for (int64_t i = 0; i < n; i += 2) {
    const uint8_t low = encode_e2m1(Value::load(x[i]) * scale);
    const uint8_t high = i + 1 < n ? encode_e2m1(Value::load(x[i + 1]) * scale) : 0;
    codes[i / 2] = static_cast<uint8_t>(low | (high << 4));
  }
}

template <typename Value>
void encode_stochastic(const void* values, int64_t n, float scale, at::philox_engine& random,
                       uint8_t* codes) {
  const auto* x = static_cast<const typename Value::Storage*>(values);
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = encode_e4m3_stochastic(Value::load(x[i]) * scale, random());
  }
}

template <typename Value>
void encode_fp4_stochastic(const void* values, int64_t n, float scale, at::philox_engine& random,
                           uint8_t* codes) {
  const auto* x = static_cast<const typename Value::Storage*>(values);
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t code = encode_e2m1_stochastic(Value::load(x[i]) * scale, random());
    codes[i / 2] = static_cast<uint8_t>(i % 2 ? codes[i / 2] | (code << 4) : code);
  }
}

template <typename Value>
void encode_with_noise(const void* values, int64_t n, float scale, MessageNoise& noise,
                       uint8_t* codes) {
  const auto* x = static_cast<const typename Value::Storage*>(values);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t code = encode_e4m3_with_noise(Value::load(x[i]), scale, noise());
    codes[i] = static_cast<uint8_t>(code);
  }
}

template <typename Value>
void encode_fp4_with_noise(const void* values, int64_t n, float scale, MessageNoise& noise,
                           uint8_t* codes) {
  const auto* x = static_cast<const typename Value::Storage*>(values);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t code = encode_e2m1_with_noise(Value::load(x[i]), scale, noise());
    codes[i / 2] = static_cast<uint8_t>(i % 2 ? codes[i / 2] | (code << 4) : code);
  }
}

template <typename Value>
void decode_fp4(const uint8_t* codes, int64_t n, float scale_inv, void* values) {
  auto* x = static_cast<typename Value::Storage*>(values);
  scale_inv = canonical_nan(scale_inv);
  for (int64_t i = 0; i < n; ++i) {
    const int code = codes[i / 2] >> (i % 2 * 4);
    x[i] = Value::store(decode_e2m1(static_cast<uint8_t>(code)) * scale_inv);
  }
}

}  // namespace

const RowKernels& portable_row_kernels() {
  static constexpr RowKernels kernels{
      {amax<Float32>, amax<BFloat16>, amax<Float16>},
      {fold_amax<Float32>, fold_amax<BFloat16>, fold_amax<Float16>},
      {encode<Float32>, encode<BFloat16>, encode<Float16>},
      {decode<Float32>, decode<BFloat16>, decode<Float16>},
      {encode_fp4<Float32>, encode_fp4<BFloat16>, encode_fp4<Float16>},
      {decode_fp4<Float32>, decode_fp4<BFloat16>, decode_fp4<Float16>}};
  return kernels;
}

const E5M2RowKernels& e5m2_row_kernels() {
  static constexpr E5M2RowKernels kernels{
      {encode_e5m2_codes<Float32>, encode_e5m2_codes<BFloat16>, encode_e5m2_codes<Float16>},
      {decode_e5m2_codes<Float32>, decode_e5m2_codes<BFloat16>, decode_e5m2_codes<Float16>}};
  return kernels;
}

const StochasticRowKernels& stochastic_row_kernels() {
  static constexpr StochasticRowKernels kernels{
      {encode_stochastic<Float32>, encode_stochastic<BFloat16>, encode_stochastic<Float16>},
      {encode_fp4_stochastic<Float32>, encode_fp4_stochastic<BFloat16>,
       encode_fp4_stochastic<Float16>}};
  return kernels;
}

const NoisyRowKernels& noisy_row_kernels() {
  static constexpr NoisyRowKernels kernels{
      {encode_with_noise<Float32>, encode_with_noise<BFloat16>, encode_with_noise<Float16>},
      {encode_fp4_with_noise<Float32>, encode_fp4_with_noise<BFloat16>,
       encode_fp4_with_noise<Float16>}};
  return kernels;
}

const RowKernels& row_kernels() {
  static const RowKernels& kernels =
      avx2_row_kernels() ? *avx2_row_kernels() : portable_row_kernels();
  return kernels;
}

}  // namespace qshard::cpu
