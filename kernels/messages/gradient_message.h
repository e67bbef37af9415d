// Messages that carry gradients in few bits: quantize what goes to each rank, sum what came from
// each. On plain memory, CPU or CUDA, one pass each.
//
// A message holds `numel` values as [codes | scales of blocks | scales of tiles], each part padded
// to 16 bytes. Values past the last one are zeros.
//
//   name     codes     block   scale of a block                       bytes per value
//   float8   E4M3      128     E8M0                                   1 + 1/128
//   mxfp8    E4M3      32      E8M0                                   1 + 1/32
//   nvfp4    E2M1      16      E4M3, times fp32 of 4096 values        1/2 + 1/16 + 1/1024
//
// A block of zeros has scale 1. One that holds NaN or infinity has a NaN scale and arrives as NaN,
// every value of it; NVFP4's tile scale comes from the other blocks. Oracle:
// test/reference/gradient_message.py. Includes no torch header: .cu files use it.
#pragma once

#include <string_view>

#include "kernels/device/stream.h"
#include "kernels/format/layout.h"
#include "kernels/numerics/row_scales.h"

namespace qshard {

/// Values that one scale of NVFP4's second level is of, and that one CUDA block works on.
constexpr int kMessageTile = 4096;

struct MessageFormat {
  std::string_view name;
  DType code_dtype;
  int64_t code_bits;
  int64_t block;  // values that share a scale byte
  RowScale block_scale;
  bool has_tile_scales;  // fp32 scales of kMessageTile values above those of blocks
};

/// @throws c10::Error naming the known formats.
const MessageFormat& find_message_format(std::string_view name);

/// Where the parts of one message lie, in bytes.
struct MessageLayout {
  const MessageFormat* format = nullptr;
  int64_t numel = 0;

  int64_t scale_offset() const { return round_up(ceil_div(numel * format->code_bits, 8), 16); }
  int64_t scale_bytes() const { return round_up(ceil_div(numel, format->block), 16); }
  int64_t tile_scale_offset() const { return scale_offset() + scale_bytes(); }
  int64_t tiles() const { return ceil_div(numel, kMessageTile); }
  bool has_tile_scales() const { return format->has_tile_scales; }
  int64_t tile_scale_bytes() const { return has_tile_scales() ? round_up(4 * tiles(), 16) : 0; }
  int64_t bytes() const { return tile_scale_offset() + tile_scale_bytes(); }
};

/// The scale of a block from the fp32 bits of its amax; `tile_scale` is NVFP4's S of the tile.
QSHARD_HOST_DEVICE BlockScale message_scale(RowScale kind, uint32_t amax, float tile_scale) {
  const bool is_e8m0 = kind == RowScale::kE8M0;
  if (amax >= kInfBits) return {is_e8m0 ? kE8M0NaN : kE4M3NaN, 1.f};
  if (amax == 0) return {static_cast<uint8_t>(is_e8m0 ? 127 : 0x38), 1.f};
  return block_scale(kind, bits_float(amax), tile_scale);
}

/// `chunks` messages of layout.numel values each, made of `numel` values that follow one another;
/// where these end before the last message does, it is filled with zeros.
struct EncodeMessagesTask {
  MessageLayout layout;
  int64_t chunks = 0;
  DType value_dtype = DType::kFloat32;  // float32, bfloat16 or float16
  const void* values = nullptr;         // (numel,)
  int64_t numel = 0;
  uint8_t* messages = nullptr;  // (chunks, layout.bytes()), 16-byte aligned
  /// Null: codes are rounded to nearest even. Else (key_low, key_high, count) of the values'
  /// device: they are rounded stochastically. Value i of message c takes noise first_noise + c *
  /// round_up(layout.numel, 16) + i of kernels/numerics/message_noise.h.
  const int32_t* rounding = nullptr;
  int64_t first_noise = 0;  // a multiple of 16
};

/// The messages of `peers` ranks about the same values, `chunks` times. values[c * layout.numel +
/// i] is their sum in fp32, in the order of peers, times `factor`, rounded once; NaN is positive
/// and quiet.
struct SumMessagesTask {
  MessageLayout layout;
  int64_t chunks = 0;
  int64_t peers = 0;
  const uint8_t* messages = nullptr;  // (chunks, peers, layout.bytes()), 16-byte aligned
  float factor = 1.f;
  DType value_dtype = DType::kFloat32;
  void* values = nullptr;  // (numel,), at most chunks * layout.numel; what is past it is dropped
  int64_t numel = 0;
};

/// @throws c10::Error for more than 65535 chunks.
void encode_messages(const EncodeMessagesTask& task, Stream stream);
/// @throws c10::Error for more than 65535 chunks.
void sum_messages(const SumMessagesTask& task, Stream stream);

}  // namespace qshard
