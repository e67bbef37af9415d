// Messages of gradients in FP8: a CUDA block makes or sums one tile of one message, in one pass.
#include "kernels/messages/gradient_message.cuh"

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

/// Codes of the values [4 * q, 4 * q + 4) of a run of which no product is above 448, or NaN.
template <typename Value>
__device__ __forceinline__ uint32_t noisy_quad(const Run<Value>& x, int q, float scale,
                                               const NoiseWords& noise) {
  const auto code = [&](int i) {
    return high_e4m3_with_noise(product_up(x.value(4 * q + i), scale), noise.of(4 * q + i));
  };
  const uint32_t codes = __byte_perm(__byte_perm(code(0), code(1), 0x0073),
                                     __byte_perm(code(2), code(3), 0x0073), 0x5410);
  constexpr int kPerVector = Run<Value>::kPerVector;
  const uint32_t signs = sign_bytes(x.vector[4 * q / kPerVector], 4 * q % kPerVector);
  return codes | (signs & 0x80808080u);
}

/// Codes of a run.
template <typename Value>
__device__ __forceinline__ uint4 noisy_codes(const Run<Value>& x, uint32_t amax, float scale,
                                             const NoiseWords& noise) {
  uint32_t words[4];
  if (amax < kInfBits && scale >= 0x1p-6f) {  // so that the other one is normal
#pragma unroll
    for (int q = 0; q < 4; ++q) words[q] = noisy_quad(x, q, scale * kE4M3AsFloat, noise);
  } else {
#pragma unroll
    for (int q = 0; q < 4; ++q) words[q] = 0;
#pragma unroll
    for (int i = 0; i < Run<Value>::kSize; ++i) {
      words[i / 4] |= encode_e4m3_with_noise(x.signed_value(i), scale, noise.of(i))
                      << (8 * (i % 4));
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// Codes of a run, rounded to nearest.
template <typename Code, typename Value>
__device__ __forceinline__ uint4 nearest_codes(const Run<Value>& x, float scale) {
  if constexpr (Run<Value>::kVectors == 2) {
    const uint2 low = encode_vector<Code>(x.vector[0], scale);
    const uint2 high = encode_vector<Code>(x.vector[1], scale);
    return make_uint4(low.x, low.y, high.x, high.y);
  } else {
    return make_uint4(
        encode_vector<Code>(x.vector[0], scale), encode_vector<Code>(x.vector[1], scale),
        encode_vector<Code>(x.vector[2], scale), encode_vector<Code>(x.vector[3], scale));
  }
}

// Without a minimum of blocks the compiler takes registers that cost half of the warps, and a
// tile's loads, which wait for its scale, leave the memory idle.
template <typename Kind, typename Value, bool kStochastic>
__global__ void __launch_bounds__(kThreads, 6)
    quantize_gradients(const __grid_constant__ EncodeArguments task) {
  constexpr int kBlock = Kind::kBlock;
  constexpr int kBlocks = Kind::kBlocks;
  constexpr int kRun = Run<Value>::kSize;
  constexpr int kLanes = kBlock / kRun;  // that hold a block
  static_assert(kThreads * kRun == kMessageTile);
  __shared__ alignas(16) uint8_t scale_bytes[kBlocks];

  const int thread = static_cast<int>(threadIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kMessageTile;
  const int64_t first = blockIdx.y * task.chunk + begin;
  const auto* tile = static_cast<const typename Value::Raw*>(task.values) + first;
  Run<Value> x[1];
  load_runs(
      task, tile, clamp_to_tile(min(task.numel - first, task.chunk - begin)),
      [&](int) { return thread * kRun; }, x);
  uint8_t* message = task.messages + blockIdx.y * task.bytes;
  NoiseWords noise;
  if constexpr (kStochastic) {  // while values are under way
    noise = MessageNoise(task.rounding).draw(noise_counter(task) + thread);
  }

  const uint32_t amax = max_over_lanes<kLanes>(amax_of(x[0]));
  const BlockScale scale = message_scale(RowScale::kE8M0, amax, 1.f);
  if (thread % kLanes == 0) scale_bytes[thread / kLanes] = scale.byte;
  if (begin + thread * kRun < task.padded_codes) {
    uint4 codes;
    if constexpr (kStochastic) {
      codes = noisy_codes(x[0], amax, scale.encode, noise);
    } else {
      codes = nearest_codes<typename Kind::Code>(x[0], scale.encode);
    }
    store_bytes(message + begin + thread * kRun, codes);
  }
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
  /// The offset of part i after transpose_over_lanes.
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

/// Whether a code times the scale of this byte, 2^-126 to 2^119, is exact in fp32, so that adding
/// it rounds once, whether fused or not.
__device__ __forceinline__ bool has_exact_products(uint32_t scale_byte) {
  return scale_byte - 1 < 246;
}

/// kPeersAtOnce messages' codes are under way together. kPeers: how many there are, or 0 for any.
template <typename Kind, typename Value, int kPeers, int kPeersAtOnce, int kMinBlocks>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    sum_gradients(const __grid_constant__ SumArguments task) {
  using Code = typename Kind::Code;
  using Span = SpanOf<Kind, Value>;
  constexpr int kSpans = Span::kSpans;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kMessageTile;
  const int peers = kPeers > 0 ? kPeers : task.peers;
  const uint8_t* message = task.messages + blockIdx.y * (peers * task.bytes);

  float total[kSpans][Span::kParts][Span::kPart];
#pragma unroll
  for (auto& span : total) {
#pragma unroll
    for (auto& part : span) {
#pragma unroll
      for (float& x : part) x = -0.f;  // x + -0 is x, of zeros too
    }
  }
  // Spans past the end read what the first of the tile does, and what is made of it is dropped.
  int64_t at[kSpans];
#pragma unroll
  for (int v = 0; v < kSpans; ++v) {
    at[v] = begin + Span::offset(v);
    if (at[v] >= task.padded_codes) at[v] = begin;
  }
#pragma unroll 1
  for (int first = 0; first < peers; first += kPeersAtOnce) {
    uint2 codes[kPeersAtOnce][kSpans];
    uint32_t scales[kPeersAtOnce][kSpans];
    const uint8_t* from = message;
#pragma unroll
    for (int p = 0; p < kPeersAtOnce; ++p, from += task.bytes) {
      if (first + p >= peers) continue;
#pragma unroll
      for (int v = 0; v < kSpans; ++v) {
        codes[p][v] = __ldg(reinterpret_cast<const uint2*>(from + at[v] / kCodesPerByte<Code>));
        scales[p][v] = __ldg(from + task.scale_offset + at[v] / Kind::kBlock);
      }
    }
#pragma unroll
    for (int p = 0; p < kPeersAtOnce; ++p) {
      if (first + p >= peers) continue;
#pragma unroll
      for (int v = 0; v < kSpans; ++v) {
        const auto add = [&](const auto& plus) {
#pragma unroll
          for (int part = 0; part < Span::kParts; ++part) {
            float x[Span::kPart];
            decode_codes<Code, Value>(Span::part(codes[p][v], part), x);
#pragma unroll
            for (int i = 0; i < Span::kPart; ++i) {
              float& sum = total[v][part][i];
              sum = plus(sum, x[i]);
            }
          }
        };
        if (has_exact_products(scales[p][v])) {
          const float scale_inv = __uint_as_float(scales[p][v] << 23);
          add([&](float sum, float x) { return __fmaf_rn(x, scale_inv, sum); });
        } else {
          const float scale_inv = e8m0_to_float(static_cast<uint8_t>(scales[p][v]));
          add([&](float sum, float x) { return __fadd_rn(sum, __fmul_rn(x, scale_inv)); });
        }
      }
    }
    message = from;
  }

  const int64_t first = blockIdx.y * task.chunk + begin;
  const int count = clamp_to_tile(min(task.numel - first, task.chunk - begin));
  auto* values = static_cast<typename Value::Raw*>(task.values) + first;
  const bool is_whole = is_whole_tile<Value>(values, count);
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
    make_nans_canonical<Value>(rounded);
    if constexpr (Span::kParts > 1) transpose_over_lanes<kWarps>(rounded);
#pragma unroll
    for (int part = 0; part < Span::kParts; ++part) {
      const int to = Span::transposed_offset(v, part);
      if (is_whole) {
        store_bytes(values + to, rounded[part]);
      } else {
        write_values<Value>(values + to, count - to, rounded[part]);
      }
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
    using Kind = decltype(kind);
    using Value = decltype(value);
    constexpr int kAtOnce = kSpansAtOnce / SpanOf<Kind, Value>::kSpans;
    if (task.peers == 2) {
      sum_gradients<Kind, Value, 2, 2, 4><<<grid, kThreads, 0, stream>>>(arguments);
    } else {
      sum_gradients<Kind, Value, 0, kAtOnce, 4><<<grid, kThreads, 0, stream>>>(arguments);
    }
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
