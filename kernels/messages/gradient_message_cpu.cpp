#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/cpu/message_noise.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/messages/gradient_message_cpu.h"

namespace qshard::cpu {
namespace {

constexpr int64_t kTilesPerThread = 4;
constexpr int64_t kMaxBlocks = kMessageTile / 16;

// Values [begin, end) of message `chunk`.
struct Tile {
  int64_t chunk;
  int64_t begin;
  int64_t end;

  int64_t numel() const { return end - begin; }
};

template <typename Run>
void for_each_tile(const MessageLayout& layout, int64_t chunks, const Run& run) {
  const int64_t tiles = layout.tiles();
  at::parallel_for(0, chunks * tiles, kTilesPerThread, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i % tiles * kMessageTile;
      run(Tile{i / tiles, begin, std::min(begin + kMessageTile, layout.numel)});
    }
  });
}

// How many of a tile's values there are before the tensor of `numel` ends.
int64_t present(const MessageLayout& layout, const Tile& tile, int64_t numel) {
  const int64_t first = tile.chunk * layout.numel + tile.begin;
  return std::clamp<int64_t>(numel - first, 0, tile.numel());
}

// A tile's values; they are copied, zeros behind them, if some are missing.
class TileValues {
 public:
  TileValues(const EncodeMessagesTask& task, const Tile& tile) {
    const int64_t size = value_size(task.value_dtype);
    const int64_t there = present(task.layout, tile, task.numel);
    if (there > 0) {
      values_ = static_cast<const uint8_t*>(task.values) +
                (tile.chunk * task.layout.numel + tile.begin) * size;
      if (there == tile.numel()) return;
      std::memcpy(copy_.data(), values_, there * size);
    }
    std::memset(copy_.data() + there * size, 0, (tile.numel() - there) * size);
    values_ = copy_.data();
  }
  const uint8_t* data() const { return values_; }

 private:
  const uint8_t* values_;
  alignas(16) std::array<uint8_t, kMessageTile * sizeof(float)> copy_;
};

// Calls encode(values, n, scale, codes) for each block of the tile, in order.
template <typename Encode>
void encode_blocks(const EncodeMessagesTask& task, const Tile& tile, const uint8_t* values,
                   const float* scales, uint8_t* codes, const Encode& encode) {
  const MessageFormat& format = *task.layout.format;
  const int64_t size = value_size(task.value_dtype);
  for (int64_t i = 0; i < tile.numel(); i += format.block) {
    encode(values + i * size, std::min(format.block, tile.numel() - i), scales[i / format.block],
           codes + (tile.begin + i) * format.code_bits / 8);
  }
}

void encode_tile(const EncodeMessagesTask& task, const Tile& tile) {
  const MessageLayout& layout = task.layout;
  const MessageFormat& format = *layout.format;
  const auto type = static_cast<int>(task.value_dtype);
  const int64_t size = value_size(task.value_dtype);
  const TileValues values(task, tile);
  uint8_t* message = task.messages + tile.chunk * layout.bytes();

  std::array<uint32_t, kMaxBlocks> amax = {};
  uint32_t tile_amax = 0;
  const auto find_amax = row_kernels().amax[type];
  for (int64_t i = 0; i < tile.numel(); i += format.block) {
    const uint32_t largest =
        find_amax(values.data() + i * size, std::min(format.block, tile.numel() - i));
    amax[i / format.block] = largest;
    if (largest < kInfBits) tile_amax = std::max(tile_amax, largest);
  }
  float tile_scale = 1.f;
  if (layout.has_tile_scales()) {
    const float scale_inv = nvfp4_tensor_scale_inv(bits_float(tile_amax));
    tile_scale = nvfp4_tensor_scale(scale_inv);
    std::memcpy(message + layout.tile_scale_offset() + tile.begin / kMessageTile * 4, &scale_inv,
                4);
  }
  std::array<float, kMaxBlocks> scales;
  const int64_t first_block = tile.begin / format.block;
  // The last tile's go on to the end of the part.
  const int64_t blocks = std::min(layout.scale_bytes() - first_block, kMessageTile / format.block);
  for (int64_t j = 0; j < blocks; ++j) {
    const BlockScale scale = message_scale(format.block_scale, amax[j], tile_scale);
    scales[j] = scale.encode;
    message[layout.scale_offset() + first_block + j] = scale.byte;
  }

  const bool fp4 = format.code_dtype == DType::kFloat4E2M1;
  if (task.rounding == nullptr) {
    const RowKernels& kernels = row_kernels();
    encode_blocks(task, tile, values.data(), scales.data(), message,
                  fp4 ? kernels.encode_fp4[type] : kernels.encode[type]);
  } else {
    const NoisyRowKernels& kernels = noisy_row_kernels();
    const auto encode = fp4 ? kernels.encode_fp4[type] : kernels.encode[type];
    const int64_t chunk = round_up(layout.numel, kNoiseValues);
    MessageNoise noise(task.rounding, task.first_noise + tile.chunk * chunk + tile.begin);
    encode_blocks(task, tile, values.data(), scales.data(), message,
                  [&](const void* x, int64_t n, float scale, uint8_t* codes) {
                    encode(x, n, scale, noise, codes);
                  });
  }
  if (tile.end < layout.numel) return;
  const int64_t code_bytes = ceil_div(layout.numel * format.code_bits, 8);
  std::memset(message + code_bytes, 0, layout.scale_offset() - code_bytes);
  if (!layout.has_tile_scales()) return;
  const int64_t end = layout.tile_scale_offset() + 4 * layout.tiles();
  std::memset(message + end, 0, layout.bytes() - end);
}

void store(const std::array<float, kMessageTile>& x, int64_t n, DType dtype, void* values,
           int64_t first) {
  if (dtype == DType::kFloat32) {
    std::transform(x.begin(), x.begin() + n, static_cast<float*>(values) + first, canonical_nan);
    return;
  }
  const auto round = dtype == DType::kBFloat16 ? float_to_bfloat16 : float_to_half;
  std::transform(x.begin(), x.begin() + n, static_cast<uint16_t*>(values) + first,
                 [&](float value) { return round(canonical_nan(value)); });
}

void sum_tile(const SumMessagesTask& task, const Tile& tile) {
  const MessageLayout& layout = task.layout;
  const MessageFormat& format = *layout.format;
  const int64_t numel = present(layout, tile, task.numel);
  if (numel == 0) return;
  const RowKernels& kernels = row_kernels();
  const auto type = static_cast<int>(DType::kFloat32);
  const auto decode =
      format.code_dtype == DType::kFloat4E2M1 ? kernels.decode_fp4[type] : kernels.decode[type];
  std::array<float, kMessageTile> total, part;
  total.fill(-0.f);  // x + -0 is x, of zeros too
  const uint8_t* message = task.messages + tile.chunk * task.peers * layout.bytes();
  for (int64_t peer = 0; peer < task.peers; ++peer, message += layout.bytes()) {
    float tile_scale_inv = 1.f;
    if (layout.has_tile_scales()) {
      std::memcpy(&tile_scale_inv,
                  message + layout.tile_scale_offset() + tile.begin / kMessageTile * 4, 4);
    }
    for (int64_t i = 0; i < numel; i += format.block) {
      const int64_t first = tile.begin + i;
      const uint8_t byte = message[layout.scale_offset() + first / format.block];
      decode(message + first * format.code_bits / 8, std::min(format.block, numel - i),
             block_scale_inv(format.block_scale, byte, tile_scale_inv), part.data() + i);
    }
    for (int64_t i = 0; i < numel; ++i) total[i] += part[i];
  }
  for (int64_t i = 0; i < numel; ++i) total[i] *= task.factor;
  store(total, numel, task.value_dtype, task.values, tile.chunk * layout.numel + tile.begin);
}

}  // namespace

void encode_messages(const EncodeMessagesTask& task) {
  for_each_tile(task.layout, task.chunks, [&](const Tile& tile) { encode_tile(task, tile); });
}

void sum_messages(const SumMessagesTask& task) {
  for_each_tile(task.layout, task.chunks, [&](const Tile& tile) { sum_tile(task, tile); });
}

}  // namespace qshard::cpu
