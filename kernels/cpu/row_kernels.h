// Kernels on one contiguous run of elements that share one scale: the inner loops of the CPU path.
#pragma once

#include <cstdint>

#include "kernels/format/formats.h"

namespace at {
class philox_engine;
}  // namespace at

namespace qshard::cpu {

class MessageNoise;

/// One set of inner loops. Value types are indexed by DType: float32, bfloat16, float16.
struct RowKernels {
  /// Largest |x| of n values as fp32 bits; every NaN counts as kNaNBits. 0 for n == 0.
  uint32_t (*amax[3])(const void* values, int64_t n);
  /// largest[i] = max(largest[i], bits of |values[i]| as fp32).
  void (*fold_amax[3])(const void* values, int64_t n, uint32_t* largest);
  /// codes[i] = E4M3(values[i] * scale), nearest even, saturating.
  void (*encode[3])(const void* values, int64_t n, float scale, uint8_t* codes);
  /// values[i] = codes[i] * scale_inv, rounded once to the value type.
  void (*decode[3])(const uint8_t* codes, int64_t n, float scale_inv, void* values);
  /// The same for E2M1, two codes per byte, the first in the low nibble; an odd n leaves the last
  /// high nibble zero.
  void (*encode_fp4[3])(const void* values, int64_t n, float scale, uint8_t* codes);
  void (*decode_fp4[3])(const uint8_t* codes, int64_t n, float scale_inv, void* values);
};

/// Plain C++; the definition of the results on every CPU.
const RowKernels& portable_row_kernels();

/// The same bits with AVX2 and F16C, or null where the build or this CPU has none.
const RowKernels* avx2_row_kernels();

/// The fastest set this CPU runs.
const RowKernels& row_kernels();

/// encode and decode of E5M2 codes.
struct E5M2RowKernels {
  void (*encode[3])(const void* values, int64_t n, float scale, uint8_t* codes);
  void (*decode[3])(const uint8_t* codes, int64_t n, float scale_inv, void* values);
};

const E5M2RowKernels& e5m2_row_kernels();

/// encode and encode_fp4 with stochastic rounding: each element takes the next word of `random`.
struct StochasticRowKernels {
  void (*encode[3])(const void* values, int64_t n, float scale, at::philox_engine& random,
                    uint8_t* codes);
  void (*encode_fp4[3])(const void* values, int64_t n, float scale, at::philox_engine& random,
                        uint8_t* codes);
};

const StochasticRowKernels& stochastic_row_kernels();

/// The same of messages of gradients: each element takes the next noise.
struct NoisyRowKernels {
  void (*encode[3])(const void* values, int64_t n, float scale, MessageNoise& noise,
                    uint8_t* codes);
  void (*encode_fp4[3])(const void* values, int64_t n, float scale, MessageNoise& noise,
                        uint8_t* codes);
};

const NoisyRowKernels& noisy_row_kernels();

}  // namespace qshard::cpu
