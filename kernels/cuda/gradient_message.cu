// Messages of gradients: a CUDA block makes or sums one tile of one message, in one pass.
#include <cuda_runtime.h>

#include "kernels/cuda/gradient_message_kernels.h"
#include "kernels/cuda/row_scaled_tile.cuh"
#include "kernels/cuda/stochastic_codes.cuh"
#include "kernels/cuda/unaligned_vectors.cuh"

namespace qshard::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSpansAtOnce = 8;  // of codes under way together

/// A format's types.
template <typename CodeType, RowScale kScale, int kValues>
struct MessageKind {
  using Code = CodeType;
  static constexpr RowScale kBlockScale = kScale;
  static constexpr int kBlock = kValues;
  static constexpr int kBlocks = kMessageTile / kBlock;  // of a tile
};

/// A tile as one thread sees it: kVectors vectors, kStride values apart.
template <typename Value>
struct TileOf {
  static constexpr int kSize = Vector<Value>::kSize;
  static constexpr int kStride = kThreads * kSize;
  static constexpr int kVectors = kMessageTile / kStride;
  __device__ static int offset(int v) {
    return v * kStride + static_cast<int>(threadIdx.x) * kSize;
  }
};

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

/// This thread's vectors of a tile that begins at `tile` and has `count` values of the tensor;
/// zeros after them.
template <typename Value, int kVectors>
__device__ __forceinline__ void load_tile(const EncodeArguments& task,
                                          const typename Value::Raw* tile, int count,
                                          Vector<Value> (&x)[kVectors]) {
  using Tile = TileOf<Value>;
  if (count == kMessageTile && reinterpret_cast<uintptr_t>(tile) % 16 == 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x[v] = load_vector<Value>(tile + Tile::offset(v));
    return;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const auto* from = tile + Tile::offset(v);
    const int left = count - Tile::offset(v);
    if (left <= 0) {
      x[v] = {};
    } else if (can_load_shifted(task.values, 1, task.numel, from, from)) {
      x[v] = load_shifted<Value>(from, left);
    } else {
      x[v] = load_some<Value>(from, left);
    }
  }
}

/// fp32 bits of a vector's largest magnitude.
template <typename Value>
__device__ __forceinline__ uint32_t amax_of(const Vector<Value>& x) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = Value::max(largest, Value::magnitudes(x.word[i]));
  return Value::amax_bits(largest);
}

/// Writes this thread's codes of a tile: scale_of(v) is what vector v is multiplied by.
template <typename Code, bool kStochastic, typename Value, int kVectors, typename ScaleOf>
__device__ __forceinline__ void write_codes(const EncodeArguments& task, int64_t begin,
                                            const Vector<Value> (&x)[kVectors], uint8_t* message,
                                            const ScaleOf& scale_of) {
  using Tile = TileOf<Value>;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = begin + Tile::offset(v);
    if (at >= task.padded_codes) continue;
    uint8_t* to = message + at / kCodesPerByte<Code>;
    if constexpr (kStochastic) {
      uint32_t words[Tile::kSize];
      const int64_t first = task.first_word + blockIdx.y * ((task.chunk + 3) / 4 * 4) + at;
      RandomWords(task.rounding).get(first, words);
      store_bytes(to, encode_vector_stochastic<Code>(x[v], scale_of(v), words));
    } else {
      store_bytes(to, encode_vector<Code>(x[v], scale_of(v)));
    }
  }
}

// Without a minimum of blocks the compiler takes registers that cost half of the warps, and a
// tile's loads, which wait for its scale, leave the memory idle.
template <typename Kind, typename Value, bool kStochastic>
__global__ void __launch_bounds__(kThreads, kStochastic ? 1 : 6)
    quantize_gradients(const __grid_constant__ EncodeArguments task) {
  using Code = typename Kind::Code;
  using Tile = TileOf<Value>;
  constexpr int kVectors = Tile::kVectors;
  constexpr int kBlock = Kind::kBlock;
  constexpr int kBlocks = Kind::kBlocks;
  constexpr int kLanes = kBlock / Tile::kSize;  // that hold a block
  constexpr bool kHasTileScale = Kind::kBlockScale == RowScale::kE4M3;
  __shared__ alignas(16) uint8_t scale_bytes[kBlocks];

  const int thread = static_cast<int>(threadIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kMessageTile;
  const int64_t first = blockIdx.y * task.chunk + begin;
  const auto* tile = static_cast<const typename Value::Raw*>(task.values) + first;
  Vector<Value> x[kVectors];
  load_tile(task, tile, clamp_to_tile(min(task.numel - first, task.chunk - begin)), x);
  uint8_t* message = task.messages + blockIdx.y * task.bytes;

  uint32_t amax[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) amax[v] = max_over_lanes<kLanes>(amax_of(x[v]));

  if constexpr (!kHasTileScale) {
    float scale[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const BlockScale of_block = message_scale(Kind::kBlockScale, amax[v], 1.f);
      scale[v] = of_block.encode;
      if (thread % kLanes == 0) scale_bytes[Tile::offset(v) / kBlock] = of_block.byte;
    }
    write_codes<Code, kStochastic>(task, begin, x, message, [&](int v) { return scale[v]; });
    __syncthreads();
  } else {
    static_assert(kBlocks == kThreads);
    __shared__ uint32_t block_amax[kBlocks];
    __shared__ uint32_t warp_amax[kWarps];
    __shared__ float encode_scale[kBlocks];
    uint32_t largest = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (thread % kLanes == 0) block_amax[Tile::offset(v) / kBlock] = amax[v];
      if (amax[v] < kInfBits) largest = max(largest, amax[v]);
    }
    largest = max_over_lanes<32>(largest);
    if (thread % 32 == 0) warp_amax[thread / 32] = largest;
    __syncthreads();
    largest = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) largest = max(largest, warp_amax[i]);
    const float scale_inv = nvfp4_tensor_scale_inv(__uint_as_float(largest));
    const BlockScale of_block =
        message_scale(Kind::kBlockScale, block_amax[thread], nvfp4_tensor_scale(scale_inv));
    scale_bytes[thread] = of_block.byte;
    encode_scale[thread] = of_block.encode;
    // The last tile's scale, and zeros up to the message's end.
    auto* tile_scales = reinterpret_cast<float*>(message + task.tile_scale_offset);
    const auto tile_scale_bytes = static_cast<int>(task.bytes - task.tile_scale_offset);
    const auto last = blockIdx.x + 1 == gridDim.x ? tile_scale_bytes / 4 : blockIdx.x + 1;
    if (blockIdx.x + thread < last) {
      tile_scales[blockIdx.x + thread] = thread == 0 ? scale_inv : 0.f;
    }
    __syncthreads();
    write_codes<Code, kStochastic>(task, begin, x, message,
                                   [&](int v) { return encode_scale[Tile::offset(v) / kBlock]; });
  }

  const int64_t scale = static_cast<int64_t>(blockIdx.x) * kBlocks + thread * 16;
  if (thread < kBlocks / 16 && scale < task.scale_bytes) {
    store_bytes(message + task.scale_offset + scale,
                reinterpret_cast<const uint4*>(scale_bytes)[thread]);
  }
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
template <int kCount>
__device__ __forceinline__ void transpose_over_lanes(uint4 (&vectors)[kCount]) {
  __shared__ uint4 staged[kWarps][32 * kCount];
  auto& of_warp = staged[threadIdx.x / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto place = [](int i) { return i ^ ((i >> 3) & 3); };  // no two lanes in one bank
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount; ++i) of_warp[place(lane * kCount + i)] = vectors[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount; ++i) vectors[i] = of_warp[place(i * 32 + lane)];
}

/// Codes that a thread of the sum has at a time, 8 bytes of one block, and their values as vectors.
template <typename Kind, typename Value>
struct SpanOf {
  using Code = typename Kind::Code;
  using Part = VectorBytes<Code, Value>;
  static constexpr int kPart = Vector<Value>::kSize;
  static constexpr int kParts = 8 / sizeof(Part);
  static constexpr int kSize = kParts * kPart;
  static constexpr int kSpans = kMessageTile / kThreads / kSize;  // of a thread
  static_assert(kSize <= Kind::kBlock && kSpans > 0);
  __device__ static int offset(int v) {
    return (v * kThreads + static_cast<int>(threadIdx.x)) * kSize;
  }
  /// Of part i after transpose_over_lanes.
  __device__ static int transposed_offset(int v, int i) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return offset(v) - lane * kSize + (32 * i + lane) * kPart;
  }
  __device__ static Part part(uint2 codes, int i) {
    if constexpr (sizeof(Part) == 8) {
      return codes;
    } else {
      const uint32_t word = word_at(codes, i * static_cast<int>(sizeof(Part)));
      return static_cast<Part>(word >> (8 * (i * sizeof(Part) % 4)));
    }
  }
};

template <typename Kind, typename Value>
__global__ void __launch_bounds__(kThreads)
    sum_gradients(const __grid_constant__ SumArguments task) {
  using Code = typename Kind::Code;
  using Span = SpanOf<Kind, Value>;
  constexpr int kSpans = Span::kSpans;
  constexpr int kPeersAtOnce = kSpansAtOnce / kSpans;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kMessageTile;
  const uint8_t* message = task.messages + blockIdx.y * (task.peers * task.bytes);

  float total[kSpans][Span::kParts][Span::kPart];
#pragma unroll
  for (auto& span : total) {
#pragma unroll
    for (auto& part : span) {
#pragma unroll
      for (float& x : part) x = -0.f;  // x + -0 is x, of zeros too
    }
  }
#pragma unroll 1
  for (int first = 0; first < task.peers; first += kPeersAtOnce) {
    uint2 codes[kPeersAtOnce][kSpans];
    uint8_t scales[kPeersAtOnce][kSpans];
    float tile_scale_inv[kPeersAtOnce];
    const uint8_t* from = message;
#pragma unroll
    for (int p = 0; p < kPeersAtOnce; ++p, from += task.bytes) {
      tile_scale_inv[p] = 1.f;
      if (first + p >= task.peers) continue;
#pragma unroll
      for (int v = 0; v < kSpans; ++v) {
        codes[p][v] = {};
        scales[p][v] = 0;
        const int64_t at = begin + Span::offset(v);
        if (at >= task.padded_codes) continue;
        codes[p][v] = __ldg(reinterpret_cast<const uint2*>(from + at / kCodesPerByte<Code>));
        scales[p][v] = __ldg(from + task.scale_offset + at / Kind::kBlock);
      }
      if constexpr (Kind::kBlockScale == RowScale::kE4M3) {
        tile_scale_inv[p] =
            __ldg(reinterpret_cast<const float*>(from + task.tile_scale_offset) + blockIdx.x);
      }
    }
#pragma unroll
    for (int p = 0; p < kPeersAtOnce; ++p) {
      if (first + p >= task.peers) continue;
#pragma unroll
      for (int v = 0; v < kSpans; ++v) {
        const float scale_inv = block_scale_inv(Kind::kBlockScale, scales[p][v], tile_scale_inv[p]);
#pragma unroll
        for (int part = 0; part < Span::kParts; ++part) {
          float x[Span::kPart];
          decode_codes<Code, Value>(Span::part(codes[p][v], part), x);
#pragma unroll
          for (int i = 0; i < Span::kPart; ++i) {
            total[v][part][i] = __fadd_rn(total[v][part][i], __fmul_rn(x[i], scale_inv));
          }
        }
      }
    }
    message = from;
  }

  const int64_t first = blockIdx.y * task.chunk + begin;
  const int count = clamp_to_tile(min(task.numel - first, task.chunk - begin));
  auto* values = static_cast<typename Value::Raw*>(task.values) + first;
#pragma unroll
  for (int v = 0; v < kSpans; ++v) {
    uint4 rounded[Span::kParts];
#pragma unroll
    for (int part = 0; part < Span::kParts; ++part) {
      float(&sum)[Span::kPart] = total[v][part];
#pragma unroll
      for (float& x : sum) x = __fmul_rn(x, task.factor);
      rounded[part] = round_values<Value>(sum);
    }
    if constexpr (Span::kParts > 1) transpose_over_lanes(rounded);
#pragma unroll
    for (int part = 0; part < Span::kParts; ++part) {
      const int at = Span::transposed_offset(v, part);
      write_values<Value>(values + at, count - at, rounded[part]);
    }
  }
}

/// Calls run(MessageKind{}, Value{}) with the types of `format` and `value_dtype`.
template <typename Run>
cudaError_t with_types(const MessageFormat& format, DType value_dtype, const Run& run) {
  const auto with_kind = [&](auto kind) {
    return with_value_type(value_dtype, [&](auto value) { return run(kind, value); });
  };
  switch (format.block) {
    case 128:
      return with_kind(MessageKind<E4M3, RowScale::kE8M0, 128>{});
    case 32:
      return with_kind(MessageKind<E4M3, RowScale::kE8M0, 32>{});
    case 16:
      return with_kind(MessageKind<E2M1, RowScale::kE4M3, 16>{});
    default:
      return cudaErrorInvalidValue;
  }
}

dim3 grid_of(const MessageLayout& layout, int64_t chunks) {
  return {static_cast<unsigned>(layout.tiles()), static_cast<unsigned>(chunks)};
}

int64_t padded_codes(const MessageLayout& layout) {
  return layout.scale_offset() * 8 / layout.format->code_bits;
}

}  // namespace

cudaError_t launch_encode_messages(const EncodeMessagesTask& task, cudaStream_t stream) {
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
  const dim3 grid = grid_of(layout, task.chunks);
  return with_types(*layout.format, task.value_dtype, [&](auto kind, auto value) {
    using Kind = decltype(kind);
    using Value = decltype(value);
    if (task.rounding == nullptr) {
      quantize_gradients<Kind, Value, false><<<grid, kThreads, 0, stream>>>(arguments);
    } else {
      quantize_gradients<Kind, Value, true><<<grid, kThreads, 0, stream>>>(arguments);
    }
    return cudaGetLastError();
  });
}

cudaError_t launch_sum_messages(const SumMessagesTask& task, cudaStream_t stream) {
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
  const dim3 grid = grid_of(layout, task.chunks);
  return with_types(*layout.format, task.value_dtype, [&](auto kind, auto value) {
    sum_gradients<decltype(kind), decltype(value)><<<grid, kThreads, 0, stream>>>(arguments);
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
