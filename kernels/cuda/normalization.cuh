// What the kernels of a normalization share: how a row's threads hold and sum it, its statistics,
// and how a value is normalized and rounded, which is the same wherever it happens.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/vector_codes.cuh"

namespace qshard::cuda {

constexpr int kNormThreads = 256;  // of a CUDA block, unless a row takes more
constexpr int kMaxNormThreads = 1024;
constexpr int kNormVectors = 2;  // of a row, that a thread holds

/// Threads of a row: a power of two of a warp's, or whole warps, which share memory.
template <int kBlockThreads>
class Lanes {
 public:
  using Shared = float[2][2][kBlockThreads / 32];

  __device__ explicit Lanes(Shared& shared) : shared_(shared) {}

  /// Sums over a row's lanes, for each of them. All threads of the block take part.
  template <int kCount>
  __device__ void sum(float (&x)[kCount]) {
#pragma unroll
    for (float& of_lane : x) {
      for (int lane = static_cast<int>(min(blockDim.x, 32u)) / 2; lane > 0; lane /= 2) {
        of_lane += __shfl_xor_sync(0xffffffffu, of_lane, lane);
      }
    }
    if (blockDim.x <= 32) return;
    const int warps = static_cast<int>(blockDim.x / 32);
    const int first = static_cast<int>(threadIdx.y) * warps;
    // Two in turn: who writes to one has seen all threads leave it.
    turn_ ^= 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (threadIdx.x % 32 == 0) shared_[turn_][i][first + threadIdx.x / 32] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = 0.f;
      for (int warp = 0; warp < warps; ++warp) x[i] += shared_[turn_][i][first + warp];
    }
  }
  __device__ float sum(float x) {
    float one[1] = {x};
    sum(one);
    return one[0];
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

/// The first column of a thread's vector i.
template <typename Value>
__device__ __forceinline__ int column_of(int i) {
  const auto vector = static_cast<int>(threadIdx.x + i * blockDim.x);
  return vector * Vector<Value>::kSize;
}

/// A thread's vectors of a row; zeros where there are none.
template <typename Value>
struct RowPart {
  Vector<Value> v[kNormVectors];

  __device__ RowPart(const void* from, int64_t row, const NormTask& task, bool exists) {
    const auto* at = static_cast<const typename Value::Raw*>(from) + row * task.cols;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      v[i] = {};
      const int c = column_of<Value>(i);
      if (exists && c < task.cols) v[i] = load_vector<Value>(at + c);
    }
  }
  __device__ float value(int i, int k) const {
    return Value::load(v[i].word_of(k), k % Value::kPerWord);
  }
};

/// A vector of values, rounded.
template <typename Value>
__device__ __forceinline__ Vector<Value> vector_of(const float (&x)[Vector<Value>::kSize]) {
  if constexpr (Value::kPerWord == 2) {
    return {{store2(Value{}, x[0], x[1]), store2(Value{}, x[2], x[3]), store2(Value{}, x[4], x[5]),
             store2(Value{}, x[6], x[7])}};
  } else {
    return {{Value::store(x[0]), Value::store(x[1]), Value::store(x[2]), Value::store(x[3])}};
  }
}

/// `kSize` parameters from `at` on, in fp32.
template <int kSize>
__device__ __forceinline__ void load_parameters(const void* from, int at, DType dtype,
                                                float (&x)[kSize]) {
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const float4 four =
          __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(from) + at + i));
      x[i] = four.x;
      x[i + 1] = four.y;
      x[i + 2] = four.z;
      x[i + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    const uint2 four =
        __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + at + i));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t word = k < 2 ? four.x : four.y;
      x[i + k] =
          dtype == DType::kBFloat16 ? BFloat16::load(word, k % 2) : Float16::load(word, k % 2);
    }
  }
}

template <typename Value>
__device__ __forceinline__ void load_gamma(const NormTask& task, int at,
                                           float (&gamma)[Vector<Value>::kSize]) {
  load_parameters(task.gamma, at, task.gamma_dtype, gamma);
  if (!task.zero_centered_gamma) return;
#pragma unroll
  for (float& x : gamma) x += 1.f;
}

/// What a vector of columns is multiplied by, and what is added to it.
template <typename Value>
struct NormParameters {
  float gamma[Vector<Value>::kSize];
  float beta[Vector<Value>::kSize] = {};

  __device__ NormParameters(const NormTask& task, int at) {
    load_gamma<Value>(task, at, gamma);
    if (task.beta != nullptr) load_parameters(task.beta, at, task.gamma_dtype, beta);
  }
};

/// A vector of x - mean, normalized and rounded. No NaN of these has a sign.
template <typename Value>
__device__ __forceinline__ Vector<Value> normed(const float (&x)[Vector<Value>::kSize], float rstd,
                                                const NormParameters<Value>& parameters) {
  float y[Vector<Value>::kSize];
#pragma unroll
  for (int k = 0; k < Vector<Value>::kSize; ++k) {
    y[k] = __fmaf_rn(__fmul_rn(x[k], rstd), parameters.gamma[k], parameters.beta[k]);
  }
  return vector_of<Value>(y);
}

/// A thread's part of a row of x, less the mean, and the row's statistics.
template <typename Value, bool kRms, int kBlockThreads>
struct NormRow {
  static constexpr int kSize = Vector<Value>::kSize;

  float x[kNormVectors][kSize];
  float mean = 0.f;
  float rstd;
  int64_t index;  // of the row
  bool exists;

  /// All threads of the block take part.
  __device__ NormRow(const NormTask& task, Lanes<kBlockThreads> lanes) {
    index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    exists = index < task.rows;
    const RowPart<Value> part(task.x, index, task, exists);
    const auto count = static_cast<float>(task.cols);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        x[i][k] = part.value(i, k);
        sum += x[i][k];
      }
    }
    if constexpr (!kRms) mean = lanes.sum(sum) / count;
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      if (column_of<Value>(i) >= task.cols) continue;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        if constexpr (!kRms) x[i][k] = __fsub_rn(x[i][k], mean);
        squares = __fmaf_rn(x[i][k], x[i][k], squares);
      }
    }
    rstd = rsqrtf(lanes.sum(squares) / count + task.eps);
  }

  __device__ void store_statistics(const NormTask& task) const {
    if (!exists || threadIdx.x != 0) return;
    task.rstd[index] = rstd;
    if constexpr (!kRms) task.mean[index] = mean;
  }

  /// The thread's vector i, whose first column is `at`.
  __device__ Vector<Value> vector(const NormTask& task, int i, int at) const {
    return normed<Value>(x[i], rstd, NormParameters<Value>(task, at));
  }
};

/// Lanes of a row, and rows of a CUDA block.
inline dim3 norm_block(const NormTask& task) {
  const int in_turn = kNormVectors * static_cast<int>(16 / value_size(task.dtype));
  const auto wanted = static_cast<unsigned>((task.cols + in_turn - 1) / in_turn);
  const unsigned lanes = wanted > 32 ? (wanted + 31) / 32 * 32 : std::bit_ceil(wanted);
  return dim3(lanes, std::max(1u, kNormThreads / lanes));
}

/// Calls run(Value{}, kRms, kBlockThreads), the latter two as std::integral_constant.
template <typename Run>
cudaError_t with_norm_types(const NormTask& task, const Run& run) {
  return with_value_type(task.dtype, [&](auto value) {
    const auto with_threads = [&](auto threads) {
      return task.mean == nullptr ? run(value, std::true_type{}, threads)
                                  : run(value, std::false_type{}, threads);
    };
    return norm_block(task).x <= kNormThreads
               ? with_threads(std::integral_constant<int, kNormThreads>{})
               : with_threads(std::integral_constant<int, kMaxNormThreads>{});
  });
}

}  // namespace qshard::cuda
