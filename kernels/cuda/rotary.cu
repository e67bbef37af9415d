// Pairs of channels turned by the angles of their positions: each value read and written once.
#include <algorithm>

#include "kernels/cuda/rotary_kernel.h"
#include "kernels/cuda/vector_codes.cuh"

namespace qshard::cuda {
namespace {

constexpr int kThreads = 256;

/// A vector, or a value alone in its place.
template <typename Value, bool kVectorized>
struct Part {
  using Raw = typename Value::Raw;
  static constexpr int kSize = kVectorized ? Vector<Value>::kSize : 1;
  float x[kSize];

  __device__ void load(const Raw* from) {
    if constexpr (kVectorized) {
      const Vector<Value> v = load_vector<Value>(from);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = Value::load(v.word_of(i), i % Value::kPerWord);
    } else {
      x[0] = Value::load(*from, 0);
    }
  }
  __device__ void store(Raw* to) const {
    if constexpr (kVectorized) {
      uint4 words;
      if constexpr (Value::kPerWord == 2) {
        words = make_uint4(store2(Value{}, x[0], x[1]), store2(Value{}, x[2], x[3]),
                           store2(Value{}, x[4], x[5]), store2(Value{}, x[6], x[7]));
      } else {
        words = make_uint4(Value::store(x[0]), Value::store(x[1]), Value::store(x[2]),
                           Value::store(x[3]));
      }
      *reinterpret_cast<uint4*>(to) = words;
    } else {
      *to = Value::store(x[0]);
    }
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

/// A row of threads takes a row of channels.
template <typename Value, bool kInterleaved, bool kVectorized>
__global__ void __launch_bounds__(kThreads) rotary(const __grid_constant__ RotaryTask task) {
  using Values = Part<Value, kVectorized>;
  using Raw = typename Value::Raw;
  constexpr int kSize = Values::kSize;
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
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    values += index[i] * task.stride[i];
    out += index[i] * task.out_stride[i];
  }
  const int64_t angles = static_cast<int64_t>(index[task.position]) * task.rotated;
  const int half = task.rotated / 2;
  const int step = static_cast<int>(blockDim.x);
  Values first, second;
  if constexpr (kInterleaved && kVectorized) {
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
    if constexpr (kVectorized) {
      *reinterpret_cast<uint4*>(out + at) = __ldg(reinterpret_cast<const uint4*>(values + at));
    } else {
      out[at] = values[at];
    }
  }
}

}  // namespace

cudaError_t launch_rotary(const RotaryTask& task, DType dtype, bool interleaved, bool vectorized,
                          cudaStream_t stream) {
  uint32_t rows = 1;
  for (const uint32_t size : task.size) rows *= size;
  if (rows == 0 || task.channels == 0) return cudaSuccess;
  const auto launch = [&](auto kernel, int size) {
    const int turns = interleaved && vectorized ? task.rotated : task.rotated / 2;
    const int wanted = std::max({turns, task.channels - task.rotated, 1}) / size;
    dim3 block(1, kThreads);
    while (static_cast<int>(block.x) < wanted && block.y > 1) {
      block.x *= 2;
      block.y /= 2;
    }
    kernel<<<(rows + block.y - 1) / block.y, block, 0, stream>>>(task);
    return cudaGetLastError();
  };
  return with_value_type(dtype, [&](auto value) {
    using Value = decltype(value);
    constexpr int kSize = Vector<Value>::kSize;
    if (interleaved) {
      return vectorized ? launch(rotary<Value, true, true>, kSize)
                        : launch(rotary<Value, true, false>, 1);
    }
    return vectorized ? launch(rotary<Value, false, true>, kSize)
                      : launch(rotary<Value, false, false>, 1);
  });
}

}  // namespace qshard::cuda
