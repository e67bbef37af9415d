// Pairs of channels turned by the angles of their positions: each value read and written once.
#include <algorithm>
#include <type_traits>

#include "kernels/device/vector_codes.cuh"
#include "kernels/rotary/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kThreads = 256;

/// Neighbouring values, in one access: at most 16 bytes, or one value in a word of its own.
template <typename Value, int kSize>
struct Part {
  using Raw = typename Value::Raw;
  using Whole = Bytes<kSize * sizeof(Raw)>;
  static constexpr int kWords = (kSize + Value::kPerWord - 1) / Value::kPerWord;
  float x[kSize];

  __device__ static Whole whole(const Raw* from) {
    return __ldg(reinterpret_cast<const Whole*>(from));
  }
  __device__ void load(const Raw* from) {
    const Whole bytes = whole(from);
    uint32_t words[kWords] = {};
    memcpy(words, &bytes, sizeof(bytes));
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] = Value::load(words[i / Value::kPerWord], i % Value::kPerWord);
    }
  }
  __device__ void store(Raw* to) const {
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kSize < Value::kPerWord) {
        words[i] = Value::store(x[i]);
      } else {
        words[i] = word_of_values<Value>(x + i * Value::kPerWord);
      }
    }
    Whole bytes;
    memcpy(&bytes, words, sizeof(bytes));
    store_bytes(to, bytes);
  }
};

/// cos and sin of kCount channels from `at` on.
template <int kCount>
struct Angles {
  float cos[kCount], sin[kCount];

  __device__ Angles(const RotaryTask& task, int64_t at) {
    read(task.cos + at, cos);
    read(task.sin + at, sin);
  }

 private:
  __device__ static void read(const float* from, float (&to)[kCount]) {
    if constexpr (kCount % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(from + i));
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
      }
    } else if constexpr (kCount == 2) {
      const float2 two = __ldg(reinterpret_cast<const float2*>(from));
      to[0] = two.x;
      to[1] = two.y;
    } else {
      to[0] = __ldg(from);
    }
  }
};

/// The pair (a, b) turned by the angles i of `of_a` and j of `of_b`.
template <int kCount>
__device__ __forceinline__ void turn(float& a, float& b, const Angles<kCount>& of_a, int i,
                                     const Angles<kCount>& of_b, int j, bool inverse) {
  const float sin_a = inverse ? -of_b.sin[j] : of_a.sin[i];
  const float sin_b = inverse ? -of_a.sin[i] : of_b.sin[j];
  const float turned = __fsub_rn(__fmul_rn(a, of_a.cos[i]), __fmul_rn(b, sin_a));
  b = __fadd_rn(__fmul_rn(b, of_b.cos[j]), __fmul_rn(a, sin_b));
  a = turned;
}

/// A row of threads takes a row of channels, a thread kSize of them at once.
template <typename Value, bool kInterleaved, int kSize>
__global__ void __launch_bounds__(kThreads) rotary(const __grid_constant__ RotaryTask task) {
  using Values = Part<Value, kSize>;
  using Raw = typename Value::Raw;
  constexpr int kDims = RotaryTask::kDims;
  uint32_t index[kDims];
  index[0] = blockIdx.x * blockDim.y + threadIdx.y;
#pragma unroll
  for (int i = kDims - 1; i > 0; --i) {
    index[i] = index[0] % task.size[i];
    index[0] /= task.size[i];
  }
  if (index[0] >= task.size[0]) return;
  const auto* values = static_cast<const Raw*>(task.values);
  auto* out = static_cast<Raw*>(task.out);
  int64_t angles = 0;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    values += index[i] * task.stride[i];
    out += index[i] * task.out_stride[i];
    angles += index[i] * task.table_stride[i];
  }
  const int half = task.rotated / 2;
  const int step = static_cast<int>(blockDim.x);
  Values first, second;
  if constexpr (kInterleaved && kSize > 1) {
    for (int at = threadIdx.x * kSize; at < task.rotated; at += step * kSize) {
      first.load(values + at);
      const Angles<kSize> of(task, angles + at);
#pragma unroll
      for (int i = 0; i < kSize; i += 2) {
        turn(first.x[i], first.x[i + 1], of, i, of, i + 1, task.inverse);
      }
      first.store(out + at);
    }
  } else {
    for (int at = threadIdx.x * kSize; at < half; at += step * kSize) {
      const int a = kInterleaved ? 2 * at : at;
      const int b = kInterleaved ? a + 1 : at + half;
      first.load(values + a);
      second.load(values + b);
      const Angles<kSize> of_a(task, angles + a);
      const Angles<kSize> of_b(task, angles + b);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        turn(first.x[i], second.x[i], of_a, i, of_b, i, task.inverse);
      }
      first.store(out + a);
      second.store(out + b);
    }
  }
  for (int at = task.rotated + threadIdx.x * kSize; at < task.channels; at += step * kSize) {
    store_bytes(out + at, Values::whole(values + at));
  }
}

}  // namespace

cudaError_t launch_rotary(const RotaryTask& task, DType dtype, bool interleaved, int at_once,
                          cudaStream_t stream) {
  uint32_t rows = 1;
  for (const uint32_t size : task.size) rows *= size;
  if (rows == 0 || task.channels == 0) return cudaSuccess;
  const auto launch = [&](auto kernel) {
    const int turns = interleaved && at_once > 1 ? task.rotated : task.rotated / 2;
    const int wanted = std::max(turns, task.channels - task.rotated) / at_once;
    const int lanes = std::clamp(wanted, 1, kThreads);
    const dim3 block(lanes, kThreads / lanes);
    kernel<<<(rows + block.y - 1) / block.y, block, 0, stream>>>(task);
    return cudaGetLastError();
  };
  return with_value_type(dtype, [&](auto value) {
    using Value = decltype(value);
    const auto launch_of = [&](auto size) {
      return interleaved ? launch(rotary<Value, true, size()>)
                         : launch(rotary<Value, false, size()>);
    };
    switch (at_once) {
      case 1:
        return launch_of(std::integral_constant<int, 1>{});
      case 2:
        return launch_of(std::integral_constant<int, 2>{});
      case 4:
        return launch_of(std::integral_constant<int, 4>{});
      default:
        return launch_of(std::integral_constant<int, Vector<Value>::kSize>{});
    }
  });
}

}  // namespace qshard::cuda
