// Messages of gradients in FP8: a CUDA block makes or sums one tile of one message, in one pass.
#include "kernels/cuda/gradient_message.cuh"

namespace qshard::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSpansAtOnce = 8;  // of codes under way together

/// A format: FP8 with E8M0 scales of kValues values.
template <int kValues>
struct MessageKind {
  using Code = E4M3;
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
    x[v] = load_ragged<Value>(task, tile + Tile::offset(v), count - Tile::offset(v));
  }
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

  float scale[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const BlockScale of_block = message_scale(RowScale::kE8M0, amax[v], 1.f);
    scale[v] = of_block.encode;
    if (thread % kLanes == 0) scale_bytes[Tile::offset(v) / kBlock] = of_block.byte;
  }
  write_codes<Code, kStochastic>(task, begin, x, message, [&](int v) { return scale[v]; });
  __syncthreads();

  const int64_t first_scale = static_cast<int64_t>(blockIdx.x) * kBlocks + thread * 16;
  if (thread < kBlocks / 16 && first_scale < task.scale_bytes) {
    store_bytes(message + task.scale_offset + first_scale,
                reinterpret_cast<const uint4*>(scale_bytes)[thread]);
  }
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
    const uint8_t* from = message;
#pragma unroll
    for (int p = 0; p < kPeersAtOnce; ++p, from += task.bytes) {
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
    }
#pragma unroll
    for (int p = 0; p < kPeersAtOnce; ++p) {
      if (first + p >= task.peers) continue;
#pragma unroll
      for (int v = 0; v < kSpans; ++v) {
        const float scale_inv = e8m0_to_float(scales[p][v]);
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
    if constexpr (Span::kParts > 1) transpose_over_lanes<kWarps>(rounded);
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
      return with_kind(MessageKind<128>{});
    case 32:
      return with_kind(MessageKind<32>{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_encode_messages(const EncodeMessagesTask& task, cudaStream_t stream) {
  if (task.layout.has_tile_scales()) return launch_encode_nvfp4_messages(task, stream);
  const EncodeArguments arguments = arguments_of(task);
  const dim3 grid = grid_of(task.layout, task.chunks);
  return with_types(*task.layout.format, task.value_dtype, [&](auto kind, auto value) {
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
  if (task.layout.has_tile_scales()) return launch_sum_nvfp4_messages(task, stream);
  const SumArguments arguments = arguments_of(task);
  const dim3 grid = grid_of(task.layout, task.chunks);
  return with_types(*task.layout.format, task.value_dtype, [&](auto kind, auto value) {
    sum_gradients<decltype(kind), decltype(value)><<<grid, kThreads, 0, stream>>>(arguments);
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
