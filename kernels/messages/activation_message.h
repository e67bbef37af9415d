// Tokens of an activation or gradient as tensor-parallel ranks send them to one another: codes and
// their scales.
#pragma once

#include <cstdint>

#include "kernels/device/stream.h"
#include "kernels/linear/quantized_matrix.h"

namespace qshard {

constexpr int64_t kTokenBlock = 128;

/// One rank's tokens (M, K): M rows of codes, then fp32 scale_inv, then zeros.
/// They are quantized as to meet a weight with scales in the grid: by one scale, or in blocks of
/// one token, whose scales lie as (ceil(K / block_cols), M).
struct ActivationMessage {
  DType code_dtype = DType::kFloat8E4M3;  // E4M3 or E5M2
  bool has_one_scale = false;
  int64_t block_cols = kTokenBlock;  // of a token that share a scale: K where all do
  bool power_of_two_scales = true;
  int64_t rows = 0;  // M
  int64_t cols = 0;  // K

  /// To meet a weight of `format`.
  ActivationMessage(const Format& format, OperandRole role, int64_t rows, int64_t cols);

  /// Codes, and bytes, from row to row; those beyond K are zero.
  int64_t pitch() const { return round_up(cols, 16); }
  int64_t code_bytes() const { return rows * pitch(); }
  int64_t scales() const { return has_one_scale ? 1 : rows * ceil_div(cols, block_cols); }
  int64_t used_bytes() const { return code_bytes() + 4 * scales(); }
  /// A multiple of 16, so that of messages in a row each begins at one.
  int64_t bytes() const { return code_bytes() + round_up(4 * scales(), 16); }
};

struct EncodeActivationTask {
  ActivationMessage message;
  const void* values = nullptr;  // (M, K), contiguous
  DType value_dtype = DType::kFloat32;
  const float* amax = nullptr;  // of one scale: (1,), of the values of all ranks
  uint8_t* bytes = nullptr;     // message.bytes(), at a multiple of 16
};

/// The values' codes and scales.
void encode_activation(const EncodeActivationTask& task, Stream stream);

struct DecodeActivationsTask {
  ActivationMessage message;  // each of them
  const uint8_t* messages = nullptr;
  int64_t ranks = 0;  // as many, one after the other
  /// Rows of a message that stay together in the whole; those of the next rank follow them.
  int64_t inner = 0;
  void* values = nullptr;  // (ranks x M, K), contiguous, at a multiple of 16
  DType value_dtype = DType::kFloat32;
};

/// values = code * scale_inv, rounded once: the same bits on every device.
void decode_activations(const DecodeActivationsTask& task, Stream stream);

}  // namespace qshard
