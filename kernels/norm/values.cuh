// How a value is normalized and rounded, which is the same wherever it happens, and its parameters.
#pragma once

#include "kernels/device/vector_codes.cuh"
#include "kernels/norm/kernels.h"

namespace qshard::cuda {

/// A vector of values, rounded.
template <typename Value>
__device__ __forceinline__ Vector<Value> vector_of(const float (&x)[Vector<Value>::kSize]) {
  const uint4 words = round_values<Value>(x);
  return {{words.x, words.y, words.z, words.w}};
}

template <typename Value>
__device__ __forceinline__ void store_vector(void* to, int64_t at, const Vector<Value>& v) {
  store_bytes(static_cast<typename Value::Raw*>(to) + at,
              make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
}

/// `to` is a multiple of 16 bytes.
template <int kSize>
__device__ __forceinline__ void store_floats(float* to, const float (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}

/// As torch adds two tensors.
template <typename Value>
__device__ __forceinline__ Vector<Value> sum_of(const Vector<Value>& a, const Vector<Value>& b) {
  float x[Vector<Value>::kSize];
#pragma unroll
  for (int k = 0; k < Vector<Value>::kSize; ++k) {
    x[k] = __fadd_rn(Value::load(a.word_of(k), k % Value::kPerWord),
                     Value::load(b.word_of(k), k % Value::kPerWord));
  }
  return vector_of<Value>(x);
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

/// What a vector of columns is multiplied by, and what is added to it: by RMSNorm nothing.
template <typename Value, bool kRms>
struct NormParameters {
  float gamma[Vector<Value>::kSize] = {};
  float beta[kRms ? 1 : Vector<Value>::kSize] = {};

  NormParameters() = default;
  __device__ NormParameters(const NormTask& task, int at) {
    load_gamma<Value>(task, at, gamma);
    if constexpr (!kRms) {
      if (task.beta != nullptr) load_parameters(task.beta, at, task.gamma_dtype, beta);
    }
  }
  /// Gamma's, then beta's.
  __device__ float& at(int k) {
    constexpr int kSize = Vector<Value>::kSize;
    return k < kSize ? gamma[k] : beta[kRms ? 0 : k - kSize];
  }
  __device__ float beta_of(int k) const { return kRms ? 0.f : beta[kRms ? 0 : k]; }
};

/// A vector of x - mean, normalized and rounded. No NaN of these has a sign.
template <typename Value, bool kRms>
__device__ __forceinline__ Vector<Value> normed(const float (&x)[Vector<Value>::kSize], float rstd,
                                                const NormParameters<Value, kRms>& parameters) {
  float y[Vector<Value>::kSize];
#pragma unroll
  for (int k = 0; k < Vector<Value>::kSize; ++k) {
    y[k] = __fmaf_rn(__fmul_rn(x[k], rstd), parameters.gamma[k], parameters.beta_of(k));
  }
  return vector_of<Value>(y);
}

}  // namespace qshard::cuda
