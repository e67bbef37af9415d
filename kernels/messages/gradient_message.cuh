// What the kernels of messages of gradients share: their arguments, ragged loads and stores.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "kernels/device/message_noise.cuh"
#include "kernels/device/unaligned_vectors.cuh"
#include "kernels/messages/gradient_message_kernels.h"
#include "kernels/quantize/row_scaled/tile.cuh"

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
  uint64_t noise_counter;   // of the first message's first value
  uint64_t noise_counters;  // of a message
};

__device__ __forceinline__ int clamp_to_tile(int64_t count) {
  return static_cast<int>(
      max(static_cast<int64_t>(0), min(count, static_cast<int64_t>(kMessageTile))));
}

/// Values that follow one another, as many as share a counter of noise. What a thread encodes: an
/// amax and scale of its own, or of a few lanes, is found once for all of them.
template <typename Value>
struct Run {
  static constexpr int kSize = 16;
  static constexpr int kPerVector = Vector<Value>::kSize;
  static constexpr int kVectors = kSize / kPerVector;
  static_assert(kSize == kNoiseValues);
  Vector<Value> vector[kVectors];

  __device__ __forceinline__ uint32_t word_of(int i) const {
    return vector[i / kPerVector].word_of(i % kPerVector);
  }
  __device__ __forceinline__ float value(int i) const {
    return Value::load(word_of(i), i % Value::kPerWord);
  }
  /// The same with a NaN's sign, which the conversion from fp16 drops.
  __device__ __forceinline__ float signed_value(int i) const {
    if constexpr (std::is_same_v<Value, Float16>) {
      const uint32_t sign = (word_of(i) >> (16 * (i % 2)) & 0x8000u) << 16;
      return __uint_as_float((__float_as_uint(value(i)) & kAbsMask) | sign);
    } else {
      return value(i);
    }
  }
};

/// `largest`, of magnitudes, or those of the values in `word` where they are larger; NaN is
/// largest. One instruction: signs are dropped on the way in.
__device__ __forceinline__ uint32_t max_magnitude(Float32, uint32_t largest, uint32_t word) {
  asm("max.NaN.f32 %0, %0, %1;" : "+r"(largest) : "r"(word & kAbsMask));
  return largest;
}
__device__ __forceinline__ uint32_t max_magnitude(BFloat16, uint32_t largest, uint32_t word) {
  return word_bits(
      __hmax2_nan(word_as<__nv_bfloat162>(largest), __habs2(word_as<__nv_bfloat162>(word))));
}
__device__ __forceinline__ uint32_t max_magnitude(Float16, uint32_t largest, uint32_t word) {
  return word_bits(__hmax2_nan(word_as<__half2>(largest), __habs2(word_as<__half2>(word))));
}

/// fp32 bits of a run's largest magnitude.
template <typename Value>
__device__ __forceinline__ uint32_t amax_of(const Run<Value>& x) {
  uint32_t largest = 0;
#pragma unroll
  for (const Vector<Value>& v : x.vector) {
#pragma unroll
    for (const uint32_t word : v.word) largest = max_magnitude(Value{}, largest, word);
  }
  return Value::amax_bits(largest);
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

/// The aligned words around a run, and the run that begins at a byte of the first vector.
template <typename Value>
struct WordsAround {
  static constexpr int kVectors = Run<Value>::kVectors + 1;
  uint32_t word[4 * kVectors];

  __device__ __forceinline__ void load(const void* aligned) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 bits = __ldg(static_cast<const uint4*>(aligned) + v);
      word[4 * v] = bits.x;
      word[4 * v + 1] = bits.y;
      word[4 * v + 2] = bits.z;
      word[4 * v + 3] = bits.w;
    }
  }

  template <int kByte>
  __device__ __forceinline__ Run<Value> run() const {
    Run<Value> x;
#pragma unroll
    for (int i = 0; i < 4 * Run<Value>::kVectors; ++i) {
      const int first = kByte / 4 + i;
      x.vector[i / 4].word[i % 4] =
          kByte % 4 == 0 ? word[first] : __funnelshift_r(word[first], word[first + 1], 16);
    }
    return x;
  }
};

/// This thread's runs of a tile that begins at `tile`, at an address of which all of it is in the
/// tensor. Whole aligned vectors are read; how far they are shifted is the same in all threads, so
/// that each distance has code of its own and moves hardly anything.
template <typename Value, int kRuns, typename Offset>
__device__ __forceinline__ void load_shifted_runs(const typename Value::Raw* tile,
                                                  const Offset& offset, Run<Value> (&x)[kRuns]) {
  const auto byte = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tile)) & 15u;
  WordsAround<Value> around[kRuns];
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    around[r].load(reinterpret_cast<const char*>(tile + offset(r)) - byte);
  }
  const auto take = [&](auto from) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) x[r] = around[r].template run<decltype(from)::value>();
  };
  using std::integral_constant;
  if constexpr (Value::kPerWord == 2) {
    switch (byte / 2) {
      case 1:
        return take(integral_constant<int, 2>{});
      case 2:
        return take(integral_constant<int, 4>{});
      case 3:
        return take(integral_constant<int, 6>{});
      case 4:
        return take(integral_constant<int, 8>{});
      case 5:
        return take(integral_constant<int, 10>{});
      case 6:
        return take(integral_constant<int, 12>{});
      default:
        return take(integral_constant<int, 14>{});
    }
  } else {
    switch (byte / 4) {
      case 1:
        return take(integral_constant<int, 4>{});
      case 2:
        return take(integral_constant<int, 8>{});
      default:
        return take(integral_constant<int, 12>{});
    }
  }
}

/// This thread's runs of a tile that begins at `tile` and has `count` values of the tensor, zeros
/// after them: run r begins offset(r) values after the tile.
template <typename Value, int kRuns, typename Offset>
__device__ __forceinline__ void load_runs(const EncodeArguments& task,
                                          const typename Value::Raw* tile, int count,
                                          const Offset& offset, Run<Value> (&x)[kRuns]) {
  using Of = Run<Value>;
  const auto load = [&](const auto& load_one) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
#pragma unroll
      for (int v = 0; v < Of::kVectors; ++v) {
        x[r].vector[v] = load_one(offset(r) + v * Of::kPerVector);
      }
    }
  };
  const auto begin = reinterpret_cast<uintptr_t>(tile);
  const auto values = reinterpret_cast<uintptr_t>(task.values);
  const uintptr_t end = values + task.numel * sizeof(typename Value::Raw);
  const uintptr_t tile_end = begin + kMessageTile * sizeof(typename Value::Raw);
  if (count == kMessageTile && begin % 16 == 0) {
    load([&](int at) { return load_vector<Value>(tile + at); });
  } else if (count == kMessageTile && (begin & ~uintptr_t{15}) >= values && tile_end + 15 <= end) {
    load_shifted_runs(tile, offset, x);
  } else {
    load([&](int at) { return load_ragged<Value>(task, tile + at, count - at); });
  }
}

/// The counter of noise of the first value of this block's tile.
__device__ __forceinline__ uint64_t noise_counter(const EncodeArguments& task) {
  return task.noise_counter + blockIdx.y * task.noise_counters +
         static_cast<uint64_t>(blockIdx.x) * (kMessageTile / kNoiseValues);
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

/// `zeros` plus zero times the values of a word: zeros, unless one is not finite. (Comparisons take
/// twice the time of products, and one for each value.)
__device__ __forceinline__ uint32_t add_zero_times(Float32, uint32_t zeros, uint32_t word) {
  return __float_as_uint(__fmaf_rn(__uint_as_float(word), 0.f, __uint_as_float(zeros)));
}
__device__ __forceinline__ uint32_t add_zero_times(BFloat16, uint32_t zeros, uint32_t word) {
  const auto zero = word_as<__nv_bfloat162>(0u);
  return word_bits(__hfma2(word_as<__nv_bfloat162>(word), zero, word_as<__nv_bfloat162>(zeros)));
}
__device__ __forceinline__ uint32_t add_zero_times(Float16, uint32_t zeros, uint32_t word) {
  const auto zero = word_as<__half2>(0u);
  return word_bits(__hfma2(word_as<__half2>(word), zero, word_as<__half2>(zeros)));
}

/// The word with NaN positive and quiet.
template <typename Value>
__device__ __forceinline__ uint32_t with_canonical_nans(uint32_t word) {
  if constexpr (Value::kPerWord == 1) {
    return (word & kAbsMask) > kInfBits ? kNaNBits : word;
  } else {
    constexpr bool kIsHalf = std::is_same_v<Value, Float16>;
    constexpr uint32_t kInf = kIsHalf ? 0x7c007c00u : 0x7f807f80u;
    constexpr uint32_t kNaN = kIsHalf ? 0x7e007e00u : 0x7fc07fc0u;
    const uint32_t is_nan = __vcmpgtu2(word & 0x7fff7fffu, kInf);
    return (word & ~is_nan) | (kNaN & is_nan);
  }
}

template <typename Value, int kCount>
__device__ __forceinline__ void make_nans_canonical(uint4 (&vectors)[kCount]) {
  uint32_t zeros = 0;
#pragma unroll
  for (const uint4& v : vectors) {
    uint32_t of_vector = add_zero_times(Value{}, 0, v.x);
    of_vector = add_zero_times(Value{}, of_vector, v.y);
    of_vector = add_zero_times(Value{}, of_vector, v.z);
    zeros |= add_zero_times(Value{}, of_vector, v.w);
  }
  if (zeros == 0) return;
#pragma unroll
  for (uint4& v : vectors) {
    v = make_uint4(with_canonical_nans<Value>(v.x), with_canonical_nans<Value>(v.y),
                   with_canonical_nans<Value>(v.z), with_canonical_nans<Value>(v.w));
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
  // Place p lies at p ^ (p / 8 % 8), so that no two lanes are in one bank.
  static_assert(8 % kCount == 0);
  const int of_lane = (lane * kCount) ^ (lane * kCount / 8 % 8);
  const int of_place = lane ^ (lane / 8);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount; ++i) of_warp[of_lane ^ i] = vectors[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount; ++i) vectors[i] = of_warp[i * 32 + (of_place ^ (4 * (i % 2)))];
}

/// Whether a tile's values are all there, in whole aligned vectors; the same in all threads.
template <typename Value>
__device__ __forceinline__ bool is_whole_tile(const typename Value::Raw* values, int count) {
  return count == kMessageTile && reinterpret_cast<uintptr_t>(values) % 16 == 0;
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
  arguments.noise_counter = static_cast<uint64_t>(task.first_noise) / kNoiseValues;
  arguments.noise_counters = static_cast<uint64_t>(ceil_div(layout.numel, kNoiseValues));
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
