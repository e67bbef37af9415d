// AdamW on registers: the operations of torch's fused kernel (aten/src/ATen/native/cuda/
// fused_adam_utils.cuh, equal in 2.11 and 2.15) in their order, each rounded where nvcc rounds it
// there, so that parameters and moments get the same bits.
#pragma once

#include <cuda_bf16.h>

#include "kernels/adamw/kernels.h"
#include "kernels/device/value_types.cuh"

namespace qshard::cuda {

/// A result as torch stores it: unlike Value::store, a NaN loses its sign.
__device__ __forceinline__ uint32_t round_result(Float32, float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32_t round_result(BFloat16, float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ __forceinline__ uint32_t round_result(Float16, float x) {
  return __half_as_ushort(__float2half_rn(x));
}

/// One element, in fp32.
struct AdamWElement {
  float x;
  float grad;
  float exp_avg;
  float exp_avg_sq;
};

/// The step of one tensor.
class AdamW {
 public:
  __device__ __forceinline__ AdamW(const AdamWParameters& parameters, const float* step)
      : p_(parameters), runs_(p_.found_inf == nullptr || *p_.found_inf != 1.f) {
    if (!runs_) return;
    const float lr = p_.device_lr ? *p_.device_lr : p_.lr;
    const float count = *step;
    step_size_ = __fdiv_rn(lr, __fsub_rn(1.f, powf(p_.beta1, count)));
    bias_correction_ = __fsqrt_rn(__fsub_rn(1.f, powf(p_.beta2, count)));
    decay_ = __fmul_rn(lr, p_.weight_decay);
    if (p_.grad_scale) grad_scale_ = *p_.grad_scale;
  }

  /// False where GradScaler found an infinity: nothing is to change.
  __device__ __forceinline__ bool runs() const { return runs_; }
  __device__ __forceinline__ bool unscales_grad() const { return p_.grad_scale != nullptr; }

  __device__ __forceinline__ void update(AdamWElement& e) const {
    if (unscales_grad()) e.grad = __fdiv_rn(e.grad, grad_scale_);
    const float grad = p_.maximize ? -e.grad : e.grad;
    if (p_.weight_decay != 0.f) e.x = __fmaf_rn(-decay_, e.x, e.x);
    e.exp_avg = __fmaf_rn(p_.beta1, e.exp_avg, __fmaf_rn(-p_.beta1, grad, grad));
    const float square = __fmul_rn(grad, grad);
    e.exp_avg_sq = __fmaf_rn(p_.beta2, e.exp_avg_sq, __fmaf_rn(-p_.beta2, square, square));
    const float denominator =
        __fadd_rn(__fdiv_rn(__fsqrt_rn(e.exp_avg_sq), bias_correction_), p_.eps);
    e.x = __fsub_rn(e.x, __fdiv_rn(__fmul_rn(step_size_, e.exp_avg), denominator));
  }

 private:
  const AdamWParameters& p_;
  bool runs_;
  float step_size_ = 0.f;
  float bias_correction_ = 0.f;
  float decay_ = 0.f;
  float grad_scale_ = 1.f;
};

/// A vector of values with its gradient and moments.
template <typename Value>
struct AdamWVectors {
  Vector<Value> x;
  Vector<Value> grad;
  Vector<Value> exp_avg;
  Vector<Value> exp_avg_sq;
};

/// Updates the first `count` elements; others become zero.
template <typename Value>
__device__ __forceinline__ void update(const AdamW& adamw, int count, AdamWVectors<Value>& v) {
  constexpr int kPerWord = Value::kPerWord;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint32_t x = 0, grad = 0, exp_avg = 0, exp_avg_sq = 0;
#pragma unroll
    for (int i = 0; i < kPerWord; ++i) {
      AdamWElement e = {Value::load(v.x.word[word], i), Value::load(v.grad.word[word], i),
                        Value::load(v.exp_avg.word[word], i),
                        Value::load(v.exp_avg_sq.word[word], i)};
      adamw.update(e);
      if (word * kPerWord + i >= count) e = {};
      x |= round_result(Value{}, e.x) << (16 * i);
      grad |= round_result(Value{}, e.grad) << (16 * i);
      exp_avg |= round_result(Value{}, e.exp_avg) << (16 * i);
      exp_avg_sq |= round_result(Value{}, e.exp_avg_sq) << (16 * i);
    }
    v.x.word[word] = x;
    v.grad.word[word] = grad;
    v.exp_avg.word[word] = exp_avg;
    v.exp_avg_sq.word[word] = exp_avg_sq;
  }
}

/// Reads `count` elements, a whole vector if `kWhole`. Not by __ldg: this kernel writes them, too.
template <bool kWhole, typename Value>
__device__ __forceinline__ void read(const void* memory, int64_t at, int count, Vector<Value>& v) {
  const auto* raw = static_cast<const typename Value::Raw*>(memory) + at;
  if constexpr (kWhole) {
    const uint4 bits = *reinterpret_cast<const uint4*>(raw);
    v = Vector<Value>{{bits.x, bits.y, bits.z, bits.w}};
  } else {
    v = load_some<Value>(raw, count);
  }
}

template <bool kWhole, typename Value>
__device__ __forceinline__ void write(void* memory, int64_t at, int count, const Vector<Value>& v) {
  using Raw = typename Value::Raw;
  auto* raw = static_cast<Raw*>(memory) + at;
  if constexpr (kWhole) {
    *reinterpret_cast<uint4*>(raw) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
  } else {
#pragma unroll
    for (int i = 0; i < Vector<Value>::kSize; ++i) {
      if (i < count) raw[i] = static_cast<Raw>(v.word_of(i) >> (16 * (i % Value::kPerWord)));
    }
  }
}

template <bool kWhole, typename Value, int kCount, typename Task>
__device__ __forceinline__ void step_vectors_of(const AdamW& adamw, const Task& task,
                                                const int64_t (&at)[kCount],
                                                const int (&count)[kCount], Vector<Value>* x) {
  AdamWVectors<Value> v[kCount];
  // All loads before the first store, which the compiler could not move them across.
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = {};
    if (count[i] <= 0) continue;
    read<kWhole>(task.values, at[i], count[i], v[i].x);
    if (!adamw.runs()) continue;
    read<kWhole>(task.memory.grad, at[i], count[i], v[i].grad);
    read<kWhole>(task.memory.exp_avg, at[i], count[i], v[i].exp_avg);
    read<kWhole>(task.memory.exp_avg_sq, at[i], count[i], v[i].exp_avg_sq);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (adamw.runs() && count[i] > 0) {
      update(adamw, kWhole ? Vector<Value>::kSize : count[i], v[i]);
      write<kWhole>(task.values, at[i], count[i], v[i].x);
      write<kWhole>(task.memory.exp_avg, at[i], count[i], v[i].exp_avg);
      write<kWhole>(task.memory.exp_avg_sq, at[i], count[i], v[i].exp_avg_sq);
      if (adamw.unscales_grad()) write<kWhole>(task.memory.grad, at[i], count[i], v[i].grad);
    }
    x[i] = v[i].x;
  }
}

/// Steps the vectors of count[i] elements from element at[i] on; x[i] are the new values, zeros
/// after the count. What found_inf keeps from running leaves the old ones.
template <typename Value, int kCount, typename Task>
__device__ __forceinline__ void step_vectors(const AdamW& adamw, const Task& task,
                                             const int64_t (&at)[kCount],
                                             const int (&count)[kCount], Vector<Value>* x) {
  if (task.vectorized) {
    step_vectors_of<true, Value>(adamw, task, at, count, x);
  } else {
    step_vectors_of<false, Value>(adamw, task, at, count, x);
  }
}

/// Vectors of each array that a thread has under way at once.
constexpr int kInFlight = 2;

}  // namespace qshard::cuda
