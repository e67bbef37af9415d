// What the kernels of messages of gradients share: their arguments, ragged loads and stores.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/gradient_message_kernels.h"
#include "kernels/cuda/row_scaled_tile.cuh"
#include "kernels/cuda/stochastic_codes.cuh"
#include "kernels/cuda/unaligned_vectors.cuh"

namespace qshard::cuda {

struct EncodeArguments {
  const void* values;
  int64_t numel;
  int64_t chunk;  // values of a message
  uint8_t* messages;
  int64_t bytes;  // of a message
  int64_t scale_offset;
  int64_t tile_scale_offset;
  int64_t padded_codes;  // codes of a message, padding included
  int64_t scale_bytes;
  const int32_t* rounding;
  int64_t first_word;
};

__device__ __forceinline__ int clamp_to_tile(int64_t count) {
  return static_cast<int>(
      max(static_cast<int64_t>(0), min(count, static_cast<int64_t>(kMessageTile))));
}

/// Reads the vector at `from`, of which the tensor has the first `count` values; zeros after them.
template <typename Value>
__device__ __forceinline__ Vector<Value> load_ragged(const EncodeArguments& task,
                                                     const typename Value::Raw* from, int count) {
  if (count <= 0) return {};
  if (can_load_shifted(task.values, 1, task.numel, from, from)) {
    return load_shifted<Value>(from, count);
  }
  return load_some<Value>(from, count);
}

/// fp32 bits of a vector's largest magnitude.
template <typename Value>
__device__ __forceinline__ uint32_t amax_of(const Vector<Value>& x) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = Value::max(largest, Value::magnitudes(x.word[i]));
  return Value::amax_bits(largest);
}

struct SumArguments {
  const uint8_t* messages;
  int64_t bytes;  // of a message
  int64_t scale_offset;
  int64_t tile_scale_offset;
  int64_t padded_codes;
  int64_t chunk;  // values of a message
  int peers;
  float factor;
  void* values;
  int64_t numel;
};

/// A vector of values, rounded; NaN is canonical.
template <typename Value>
__device__ __forceinline__ uint4 round_values(const float (&x)[Vector<Value>::kSize]) {
  if constexpr (Value::kPerWord == 1) {
    return make_uint4(Value::store(canonical_nan(x[0])), Value::store(canonical_nan(x[1])),
                      Value::store(canonical_nan(x[2])), Value::store(canonical_nan(x[3])));
  } else {
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) has_nan |= x[i] != x[i];
    if (!has_nan) {
      return make_uint4(store2(Value{}, x[0], x[1]), store2(Value{}, x[2], x[3]),
                        store2(Value{}, x[4], x[5]), store2(Value{}, x[6], x[7]));
    }
    const auto pair = [&](int i) {
      return Value::store(canonical_nan(x[i])) |
             static_cast<uint32_t>(Value::store(canonical_nan(x[i + 1]))) << 16;
    };
    return make_uint4(pair(0), pair(2), pair(4), pair(6));
  }
}

/// Writes the first `count` values of a vector.
template <typename Value>
__device__ __forceinline__ void write_values(typename Value::Raw* to, int count, uint4 bits) {
  constexpr int kSize = Vector<Value>::kSize;
  if (count >= kSize && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    store_bytes(to, bits);
    return;
  }
  typename Value::Raw values[kSize];
  memcpy(values, &bits, sizeof bits);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i < count) to[i] = values[i];
  }
}

/// Vectors that follow one another in each lane, and then from lane to lane, become vectors that
/// follow one another over the lanes, so that a warp's stores do: vector i of lane l is that of
/// place 32 * i + l.
template <int kWarps, int kCount>
__device__ __forceinline__ void transpose_over_lanes(uint4 (&vectors)[kCount]) {
  __shared__ uint4 staged[kWarps][32 * kCount];
  auto& of_warp = staged[threadIdx.x / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto place = [](int i) { return i ^ ((i >> 3) & 7); };  // no two lanes in one bank
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount; ++i) of_warp[place(lane * kCount + i)] = vectors[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount; ++i) vectors[i] = of_warp[place(i * 32 + lane)];
}

inline dim3 grid_of(const MessageLayout& layout, int64_t chunks) {
  return {static_cast<unsigned>(layout.tiles()), static_cast<unsigned>(chunks)};
}

inline int64_t padded_codes(const MessageLayout& layout) {
  return layout.scale_offset() * 8 / layout.format->code_bits;
}

inline EncodeArguments arguments_of(const EncodeMessagesTask& task) {
  const MessageLayout& layout = task.layout;
  EncodeArguments arguments;
  arguments.values = task.values;
  arguments.numel = task.numel;
  arguments.chunk = layout.numel;
  arguments.messages = task.messages;
  arguments.bytes = layout.bytes();
  arguments.scale_offset = layout.scale_offset();
  arguments.tile_scale_offset = layout.tile_scale_offset();
  arguments.padded_codes = padded_codes(layout);
  arguments.scale_bytes = layout.scale_bytes();
  arguments.rounding = task.rounding;
  arguments.first_word = task.first_word;
  return arguments;
}

inline SumArguments arguments_of(const SumMessagesTask& task) {
  const MessageLayout& layout = task.layout;
  SumArguments arguments;
  arguments.messages = task.messages;
  arguments.bytes = layout.bytes();
  arguments.scale_offset = layout.scale_offset();
  arguments.tile_scale_offset = layout.tile_scale_offset();
  arguments.padded_codes = padded_codes(layout);
  arguments.chunk = layout.numel;
  arguments.peers = static_cast<int>(task.peers);
  arguments.factor = task.factor;
  arguments.values = task.values;
  arguments.numel = task.numel;
  return arguments;
}

}  // namespace qshard::cuda
