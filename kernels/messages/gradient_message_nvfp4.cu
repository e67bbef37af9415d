// Messages of gradients in NVFP4: a CUDA block makes or sums one tile of one message, in one pass.
//
// At two values to the byte arithmetic is the limit, not memory. So a thread has whole blocks of 16
// values: their amax and scale need no other lane, each is found once, and what is per thread is
// shared by 32 values. Arithmetic is that of kernels/numerics/nvfp4_message.h, without branches and
// divisions; tiles and blocks out of its range take the general way.
#include "kernels/messages/gradient_message.cuh"
#include "kernels/numerics/nvfp4_message.h"

namespace qshard::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kBlock = 16;                                 // values that share a scale
constexpr int kBlocks = kMessageTile / kBlock / kThreads;  // of a thread
static_assert(kBlocks == 2);

/// Block b of this thread, counted from the tile's first.
__device__ __forceinline__ int block_of_tile(int b) {
  return b * kThreads + static_cast<int>(threadIdx.x);
}

/// message_scale of a block in a tile that is_ordinary_tile().
__device__ __forceinline__ BlockScale ordinary_block_scale(uint32_t amax,
                                                           const Nvfp4TileScales& tile) {
  const bool is_special = amax - 1 >= kInfBits - 1;  // zero, or not finite
  const auto byte = static_cast<uint8_t>(
      unsigned_nan_pair<E4M3>(__fmul_rn(__uint_as_float(amax), tile.amax_factor), 0.f) & 0x7fu);
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(byte, __NV_E4M3);
  const float value = __half2float(__low2half(__half2(halves)));
  const float scale = divide_by_few_bits(tile.scale, value, approximate_inverse(value));
  if (is_special) return {static_cast<uint8_t>(amax == 0 ? 0x38 : kE4M3NaN), 1.f};
  return {byte, byte == 0 ? 0.f : scale};
}

/// Codes of a block whose largest product is below 7.
template <typename Value>
__device__ __forceinline__ uint2 nearest_codes(const Run<Value>& x, float scale) {
  uint32_t words[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t codes = 0, signs = 0;
#pragma unroll
    for (int i = 8 * half + 7; i >= 8 * half; --i) {
      const float value = x.value(i);
      codes = codes * 16 + biased_e2m1(__fmul_rn(fabsf(value), scale));
      signs = __funnelshift_l(__float_as_uint(value), signs, 4);
    }
    // What the biases have come to, modulo 2^32: those of all but the first two are shifted out.
    codes -= kE2M1Bias + kE2M1Bias * 16;
    words[half] = codes | (signs & 0x88888888u);
  }
  return make_uint2(words[0], words[1]);
}

/// Bytes whose highest bits are the signs of the values i + 1, i, i + 3 and i + 2 of a run.
template <typename Value>
__device__ __forceinline__ uint32_t swapped_signs(const Run<Value>& x, int i) {
  if constexpr (Value::kPerWord == 1) {
    return __byte_perm(__byte_perm(x.word_of(i + 1), x.word_of(i), 0x0073),
                       __byte_perm(x.word_of(i + 3), x.word_of(i + 2), 0x0073), 0x5410);
  } else {
    return __byte_perm(x.word_of(i), x.word_of(i + 2), 0x5713);
  }
}

/// Codes of a block whose largest product is below 7, of a scale of at least 1, or, if kMoved, in a
/// tile that is_movable_tile().
template <bool kMoved, typename Value>
__device__ __forceinline__ uint2 noisy_codes(const Run<Value>& x, float scale,
                                             const NoiseWords& noise) {
  const float moved = __fmul_rn(scale, kMoved ? kE2M1AsFloat / kMovedValue : kE2M1AsFloat);
  const auto code = [&](int i) {
    const float value = kMoved ? product_up(x.value(i), kMovedValue) : x.value(i);
    return high_e2m1_with_noise(product_up(value, moved), noise.of(i));
  };
  // The high halves of two, at most 7 and a fraction.
  const auto pair = [&](int first, int second) {
    return __vminu2(__byte_perm(code(first), code(second), 0x7632), 0x07ff07ffu);
  };
  // Four codes with their signs, a byte each; then, in the bytes 1 and 3, two each.
  const auto quad = [&](int i) {
    const uint32_t codes = __byte_perm(pair(i + 1, i), pair(i + 3, i + 2), 0x7531);
    const uint32_t nibbles = codes | (swapped_signs(x, i) >> 4 & 0x08080808u);
    return nibbles * 0x1001u;
  };
  return make_uint2(__byte_perm(quad(0), quad(4), 0x7531), __byte_perm(quad(8), quad(12), 0x7531));
}

/// Codes of any block.
template <typename Value>
__device__ __forceinline__ uint2 general_codes(const Run<Value>& x, float scale) {
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float value = x.signed_value(i);
    const uint32_t code = encode_e2m1(__fmul_rn(value, scale)) & 7u;
    words[i / 8] |= (code | (__float_as_uint(value) >> 28 & 8u)) << (4 * i % 32);
  }
  return make_uint2(words[0], words[1]);
}

template <typename Value>
__device__ __forceinline__ uint2 general_noisy_codes(const Run<Value>& x, float scale,
                                                     const NoiseWords& noise) {
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    words[i / 8] |= encode_e2m1_with_noise(x.signed_value(i), scale, noise.of(i)) << (4 * i % 32);
  }
  return make_uint2(words[0], words[1]);
}

template <typename Value>
__device__ __forceinline__ uint2 noisy_codes(const Run<Value>& x, float scale,
                                             const NoiseWords& noise, bool is_small,
                                             uint32_t tile_amax) {
  if (!is_small || !is_movable_tile(tile_amax)) return general_noisy_codes(x, scale, noise);
  // Scales are at least 448 * 6 / 448 of the tile's amax.
  if (tile_amax < 0x40800000u) return noisy_codes<false>(x, scale, noise);
  return noisy_codes<true>(x, scale, noise);
}

template <typename Value, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
    quantize_nvfp4_gradients(const __grid_constant__ EncodeArguments task) {
  __shared__ uint32_t warp_amax[kWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kMessageTile;
  const int64_t first = blockIdx.y * task.chunk + begin;
  const auto* tile = static_cast<const typename Value::Raw*>(task.values) + first;
  Run<Value> x[kBlocks];
  load_runs(
      task, tile, clamp_to_tile(min(task.numel - first, task.chunk - begin)),
      [](int b) { return block_of_tile(b) * kBlock; }, x);
  uint8_t* message = task.messages + blockIdx.y * task.bytes;
  NoiseWords noise[kBlocks];
  if constexpr (kStochastic) {  // while values are under way
    const MessageNoise source(task.rounding);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      noise[b] = source.draw(noise_counter(task) + block_of_tile(b));
  }

  uint32_t amax[kBlocks];
  uint32_t largest = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    amax[b] = amax_of(x[b]);
    if (amax[b] < kInfBits) largest = max(largest, amax[b]);
  }
  largest = __reduce_max_sync(kWholeWarp, largest);
  if (thread % 32 == 0) warp_amax[thread / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) largest = max(largest, warp_amax[i]);

  const bool is_ordinary = is_ordinary_tile(largest);
  Nvfp4TileScales scales;
  if (is_ordinary) {
    scales = ordinary_tile_scales(largest);
  } else {
    scales.scale_inv = nvfp4_tensor_scale_inv(__uint_as_float(largest));
    scales.scale = nvfp4_tensor_scale(scales.scale_inv);
    scales.amax_factor = 0.f;
  }
  const bool is_last = blockIdx.x + 1 == gridDim.x;
  // The tile's scale, and zeros from the last one's to the message's end.
  auto* tile_scales = reinterpret_cast<float*>(message + task.tile_scale_offset);
  const auto tile_scale_bytes = static_cast<uint32_t>(task.bytes - task.tile_scale_offset);
  if (thread == 0 || (is_last && blockIdx.x + thread < tile_scale_bytes / 4)) {
    tile_scales[blockIdx.x + thread] = thread == 0 ? scales.scale_inv : 0.f;
  }

  uint8_t* codes = message + begin / 2;
  uint8_t* scale_bytes = message + task.scale_offset + begin / kBlock;
  // Only the last tile may have fewer: 32 bits are enough for what it has.
  const int padded_codes = is_last ? static_cast<int>(task.padded_codes - begin) : kMessageTile;
  const int padded_scales =
      is_last ? static_cast<int>(task.scale_bytes - begin / kBlock) : kMessageTile / kBlock;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int block = block_of_tile(b);
    const BlockScale scale = is_ordinary ? ordinary_block_scale(amax[b], scales)
                                         : message_scale(RowScale::kE4M3, amax[b], scales.scale);
    if (block < padded_scales) scale_bytes[block] = scale.byte;
    if (block * kBlock >= padded_codes) continue;
    // So is each of the block's products. NaN and infinity are not.
    const bool is_small = __fmul_rn(__uint_as_float(amax[b]), scale.encode) < 7.f;
    uint2 of_block;
    if constexpr (kStochastic) {
      of_block = noisy_codes(x[b], scale.encode, noise[b], is_small, largest);
    } else {
      of_block = is_small ? nearest_codes(x[b], scale.encode) : general_codes(x[b], scale.encode);
    }
    store_bytes(codes + block * (kBlock / 2), of_block);
  }
}

/// Adds the values of a word of codes with an exact product. kIsFirst: puts them there.
template <bool kIsFirst>
__device__ __forceinline__ void add_exact(uint32_t codes, float scale_inv, float* total) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const float scale = __fmul_rn(scale_inv, 0x1p6f);
  const auto add = [&](uint32_t four, int first) {
    uint16_t pairs[2];
    asm("mov.b32 {%0, %1}, %2;" : "=h"(pairs[0]), "=h"(pairs[1]) : "r"(four));
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float2 x = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pairs[i / 2], __NV_E4M3)));
      float& low = total[2 * i + first];
      float& high = total[2 * i + 2 + first];
      low = kIsFirst ? __fmul_rn(x.x, scale) : __fmaf_rn(x.x, scale, low);
      high = kIsFirst ? __fmul_rn(x.y, scale) : __fmaf_rn(x.y, scale, high);
    }
  };
  add(e2m1_as_e4m3<0>(codes), 0);
  add(e2m1_as_e4m3<1>(codes), 1);
#else
  float x[8];
  decode_codes<E2M1, BFloat16>(codes, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    total[i] = kIsFirst ? __fmul_rn(x[i], scale_inv) : __fmaf_rn(x[i], scale_inv, total[i]);
  }
#endif
}

template <bool kIsFirst>
__device__ __forceinline__ void add_rounded(uint32_t codes, float scale_inv, float* total) {
  float x[8];
  decode_codes<E2M1, BFloat16>(codes, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float product = __fmul_rn(x[i], scale_inv);
    total[i] = kIsFirst ? product : __fadd_rn(total[i], product);
  }
}

constexpr int kSumValues = kMessageTile / kThreads;  // of a thread, one after another
static_assert(kSumValues == 2 * kBlock);             // 16 bytes of codes, two scales

/// Where a thread reads a message.
struct PartOfMessage {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* tile_scale;
};

/// Adds this thread's values of kCount messages, `bytes` apart, and moves on to the next. kIsFirst:
/// the first of them is the first of all.
template <int kCount, bool kIsFirst = false>
__device__ __forceinline__ void add_messages(PartOfMessage& from, int64_t bytes,
                                             float (&total)[kSumValues]) {
  uint4 codes[kCount];
  uint16_t scales[kCount];
  float tile_scale_inv[kCount];
#pragma unroll
  for (int p = 0; p < kCount; ++p) {
    codes[p] = __ldg(reinterpret_cast<const uint4*>(from.codes));
    scales[p] = __ldg(reinterpret_cast<const uint16_t*>(from.scales));
    tile_scale_inv[p] = __ldg(reinterpret_cast<const float*>(from.tile_scale));
    from.codes += bytes;
    from.scales += bytes;
    from.tile_scale += bytes;
  }
#pragma unroll
  for (int p = 0; p < kCount; ++p) {
    const float2 of_blocks =
        __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(scales[p], __NV_E4M3)));
    const float scale_inv[2] = {__fmul_rn(of_blocks.x, tile_scale_inv[p]),
                                __fmul_rn(of_blocks.y, tile_scale_inv[p])};
    const uint32_t words[4] = {codes[p].x, codes[p].y, codes[p].z, codes[p].w};
    const auto add = [&](auto is_first) {
      constexpr bool kPuts = decltype(is_first)::value;
      if (has_exact_products(tile_scale_inv[p])) {
#pragma unroll
        for (int i = 0; i < 4; ++i) add_exact<kPuts>(words[i], scale_inv[i / 2], total + 8 * i);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) add_rounded<kPuts>(words[i], scale_inv[i / 2], total + 8 * i);
      }
    };
    if (kIsFirst && p == 0) {
      add(std::true_type{});
    } else {
      add(std::false_type{});
    }
  }
}

/// Adds `left` messages, kCount at a time, and what is left then by half as many.
template <int kCount>
__device__ __forceinline__ void add_groups(PartOfMessage& from, int64_t bytes, int left,
                                           float (&total)[kSumValues]) {
#pragma unroll 1
  for (; left >= kCount; left -= kCount) add_messages<kCount>(from, bytes, total);
  if constexpr (kCount > 1) add_groups<kCount / 2>(from, bytes, left, total);
}

// kAtOnce messages' codes are under way together; the minimum of blocks keeps enough so. kPeers:
// how many there are, or 0 for any.
template <typename Value, int kPeers, int kAtOnce, int kMinBlocks>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    sum_nvfp4_gradients(const __grid_constant__ SumArguments task) {
  constexpr int kSize = Vector<Value>::kSize;
  const int at = static_cast<int>(threadIdx.x) * kSumValues;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kMessageTile;
  const uint8_t* message = task.messages + blockIdx.y * (task.peers * task.bytes);
  // Threads past the end read what the first of the tile does, and drop what they make of it.
  const int64_t mine = begin + at < task.padded_codes ? begin + at : begin;
  PartOfMessage from = {message + mine / 2, message + task.scale_offset + mine / kBlock,
                        message + task.tile_scale_offset + 4 * static_cast<int64_t>(blockIdx.x)};

  float total[kSumValues];
  if constexpr (kPeers > 0) {
    add_messages<kPeers, true>(from, task.bytes, total);
  } else {
#pragma unroll
    for (float& x : total) x = -0.f;  // x + -0 is x, of zeros too
    add_groups<kAtOnce>(from, task.bytes, task.peers, total);
  }

  const int64_t first = blockIdx.y * task.chunk + begin;
  const int count = clamp_to_tile(min(task.numel - first, task.chunk - begin));
  auto* values = static_cast<typename Value::Raw*>(task.values) + first;
  uint4 rounded[kSumValues / kSize];
#pragma unroll
  for (int v = 0; v < kSumValues / kSize; ++v) {
    float sum[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] = __fmul_rn(total[v * kSize + i], task.factor);
    rounded[v] = round_values<Value>(sum);
  }
  make_nans_canonical<Value>(rounded);
  transpose_over_lanes<kWarps>(rounded);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int of_warp = at - lane * kSumValues + lane * kSize;
  if (is_whole_tile<Value>(values, count)) {
#pragma unroll
    for (int v = 0; v < kSumValues / kSize; ++v) {
      store_bytes(values + of_warp + v * 32 * kSize, rounded[v]);
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < kSumValues / kSize; ++v) {
    const int to = of_warp + v * 32 * kSize;
    write_values<Value>(values + to, count - to, rounded[v]);
  }
}

}  // namespace

cudaError_t launch_encode_nvfp4_messages(const EncodeMessagesTask& task, cudaStream_t stream) {
  const EncodeArguments arguments = arguments_of(task);
  const dim3 grid = grid_of(task.layout, task.chunks);
  return with_value_type(task.value_dtype, [&](auto value) {
    using Value = decltype(value);
    if (task.rounding == nullptr) {
      quantize_nvfp4_gradients<Value, false><<<grid, kThreads, 0, stream>>>(arguments);
    } else {
      quantize_nvfp4_gradients<Value, true><<<grid, kThreads, 0, stream>>>(arguments);
    }
    return cudaGetLastError();
  });
}

cudaError_t launch_sum_nvfp4_messages(const SumMessagesTask& task, cudaStream_t stream) {
  const SumArguments arguments = arguments_of(task);
  const dim3 grid = grid_of(task.layout, task.chunks);
  return with_value_type(task.value_dtype, [&](auto value) {
    using Value = decltype(value);
    if (task.peers == 2) {
      sum_nvfp4_gradients<Value, 2, 2, 7><<<grid, kThreads, 0, stream>>>(arguments);
    } else {
      sum_nvfp4_gradients<Value, 0, 4, 7><<<grid, kThreads, 0, stream>>>(arguments);
    }
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
