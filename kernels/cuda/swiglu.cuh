// silu(gate) * up and its gradients, of tiles in registers.
#pragma once

#include "kernels/cuda/activation_tile.cuh"
#include "kernels/cuda/swiglu_kernels.h"

namespace qshard::cuda {

/// 1 + exp(-x): silu is x over it, the sigmoid 1 over it, divided exactly as torch divides.
__device__ __forceinline__ float silu_divisor(float x) { return 1.f + expf(-x); }

/// The values of a word, as torch rounds them.
template <typename Value>
__device__ __forceinline__ uint32_t word_of_values(const float (&x)[Value::kPerWord]) {
  if constexpr (Value::kPerWord == 2) {
    return store2(Value{}, x[0], x[1]);
  } else {
    return __float_as_uint(x[0]);
  }
}

/// A word of f(i), i of each of its values.
template <typename Value, typename F>
__device__ __forceinline__ uint32_t map_word(const F& f) {
  float x[Value::kPerWord];
#pragma unroll
  for (int i = 0; i < Value::kPerWord; ++i) x[i] = f(i);
  return word_of_values<Value>(x);
}

/// gate becomes silu(gate) * up. silu(gate) is rounded as a tensor of its own would be.
template <typename Value>
__device__ __forceinline__ void swiglu(ActivationTile<Value>& gate,
                                       const ActivationTile<Value>& up) {
#pragma unroll
  for (int r = 0; r < ActivationTile<Value>::kRows; ++r) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t g = gate.values[r].word[w];
      const uint32_t u = up.values[r].word[w];
      const uint32_t silu = map_word<Value>([&](int i) {
        const float x = Value::load(g, i);
        return __fdiv_rn(x, silu_divisor(x));
      });
      gate.values[r].word[w] = map_word<Value>(
          [&](int i) { return __fmul_rn(Value::load(silu, i), Value::load(u, i)); });
    }
  }
}

/// (grad, gate, up) become the gradients of gate and of up, and silu(gate) * up.
template <typename Value>
__device__ __forceinline__ void swiglu_backward(ActivationTile<Value>& grad,
                                                ActivationTile<Value>& gate,
                                                ActivationTile<Value>& up) {
#pragma unroll
  for (int r = 0; r < ActivationTile<Value>::kRows; ++r) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t d = grad.values[r].word[w];
      const uint32_t g = gate.values[r].word[w];
      const uint32_t u = up.values[r].word[w];
      float s[Value::kPerWord];
      const uint32_t silu = map_word<Value>([&](int i) {
        const float x = Value::load(g, i);
        const float divisor = silu_divisor(x);
        s[i] = __frcp_rn(divisor);
        return __fdiv_rn(x, divisor);
      });
      const uint32_t grad_silu =
          map_word<Value>([&](int i) { return __fmul_rn(Value::load(d, i), Value::load(u, i)); });
      grad.values[r].word[w] = map_word<Value>([&](int i) {
        const float x = Value::load(g, i);
        return Value::load(grad_silu, i) * s[i] * (1.f + x * (1.f - s[i]));
      });
      gate.values[r].word[w] = map_word<Value>(
          [&](int i) { return __fmul_rn(Value::load(d, i), Value::load(silu, i)); });
      up.values[r].word[w] = map_word<Value>(
          [&](int i) { return __fmul_rn(Value::load(silu, i), Value::load(u, i)); });
    }
  }
}

inline dim3 swiglu_grid(const SwigluTask& task) {
  return dim3(static_cast<unsigned>((task.k + kTile - 1) / kTile),
              static_cast<unsigned>((task.m + kTile - 1) / kTile));
}

/// Calls run(Value{}, std::bool_constant{}) with the type of `dtype`, and whether vectors are
/// aligned and whole.
template <typename Run>
cudaError_t with_swiglu_types(const SwigluTask& task, DType dtype, const Run& run) {
  const int64_t size = value_size(dtype);
  const auto is_aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  const bool vectorized = is_aligned(task.gate) && is_aligned(task.up) && is_aligned(task.grad) &&
                          task.k * size % 16 == 0 && task.ld_gate * size % 16 == 0 &&
                          task.ld_up * size % 16 == 0;
  return with_value_type(dtype, [&](auto value) {
    return vectorized ? run(value, std::true_type{}) : run(value, std::false_type{});
  });
}

}  // namespace qshard::cuda
