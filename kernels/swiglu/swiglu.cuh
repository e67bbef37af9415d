// silu(gate) * up and its gradients, of tiles in registers.
#pragma once

#include <type_traits>

#include "kernels/activation/tile.cuh"
#include "kernels/device/amax.cuh"
#include "kernels/swiglu/kernels.h"

namespace qshard::cuda {

/// 1 over a divisor from 1 to 2^126, rounded to nearest: the steps of __frcp_rn, without its checks
/// of exponents.
__device__ __forceinline__ float ordinary_reciprocal(float divisor) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(divisor));
  return __fmaf_rn(reciprocal, __fmaf_rn(-divisor, reciprocal, 1.f), reciprocal);
}

/// 1 over 1 + exp(-x). `kOrdinary`: |x| < kOrdinaryGate.
template <bool kOrdinary>
__device__ __forceinline__ float sigmoid_of(float x) {
  const float divisor = 1.f + expf(-x);
  return kOrdinary ? ordinary_reciprocal(divisor) : __frcp_rn(divisor);
}

/// Whether fewer instructions give the silu that a division does, once it is rounded: for each
/// ordinary bfloat16 on Hopper, whose approximate instructions were tried.
template <typename Value>
__device__ constexpr bool has_short_silu() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  return std::is_same_v<Value, BFloat16>;
#else
  return false;
#endif
}

/// x over 1 + exp(-x), yet to be rounded to `Value`.
template <typename Value, bool kOrdinary>
__device__ __forceinline__ float silu_of(float x) {
  if constexpr (!kOrdinary) return __fdiv_rn(x, 1.f + expf(-x));
  if constexpr (has_short_silu<Value>()) {
    float power, reciprocal;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(x, -1.44269504f)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.f + power));
    return __fmul_rn(x, reciprocal);
  }
  // The steps of __fdiv_rn, without its checks. Zeros keep their sign.
  const float divisor = 1.f + expf(-x);
  const float reciprocal = ordinary_reciprocal(divisor);
  const float quotient = __fmul_rn(x, reciprocal);
  const float error = __fmaf_rn(divisor, quotient, -x);
  return __fmaf_rn(error, -reciprocal, quotient);
}

/// Beyond it, or at a NaN, a step of the short division may leave fp32's range.
constexpr float kOrdinaryGate = 87.f;

/// Calls run(std::bool_constant{}) with whether kCount gates are ordinary.
template <int kCount, typename Value, typename Run>
__device__ __forceinline__ void with_gates(const Vector<Value>* gates, const Run& run) {
  if (largest_of<Value, kCount>(gates) < __float_as_uint(kOrdinaryGate)) {
    run(std::true_type{});
  } else {
    run(std::false_type{});
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

/// The products of two words' values.
template <typename Value>
__device__ __forceinline__ uint32_t product_of(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<Value, BFloat16>) {
    // Rounded once, as fp32's product is: that has all bits.
    return word_bits(__hmul2_rn(word_as<__nv_bfloat162>(a), word_as<__nv_bfloat162>(b)));
  } else {
    return map_word<Value>([&](int i) { return __fmul_rn(Value::load(a, i), Value::load(b, i)); });
  }
}

/// gate becomes silu(gate) * up. silu(gate) is rounded as a tensor of its own would be; seen(word)
/// is called with each word of it.
template <typename Value, int kThreads, typename Seen>
__device__ __forceinline__ void swiglu(ActivationTile<Value, kThreads>& gate,
                                       const ActivationTile<Value, kThreads>& up,
                                       const Seen& seen) {
  constexpr int kRows = ActivationTile<Value, kThreads>::kRows;
  with_gates<kRows>(gate.values, [&](auto ordinary) {
#pragma unroll
    for (int at = 0; at < 4 * kRows; ++at) {
      const int r = at / 4;
      const int w = at % 4;
      const uint32_t g = gate.values[r].word[w];
      const uint32_t u = up.values[r].word[w];
      const uint32_t silu = map_word<Value>(
          [&](int i) { return silu_of<Value, decltype(ordinary)::value>(Value::load(g, i)); });
      seen(silu);
      gate.values[r].word[w] = product_of<Value>(silu, u);
    }
  });
}

/// kCount vectors of (grad, gate, up) become the gradients of gate and of up, and silu(gate) * up.
template <int kCount, typename Value>
__device__ __forceinline__ void swiglu_backward(Vector<Value>* grad, Vector<Value>* gate,
                                                Vector<Value>* up) {
  with_gates<kCount>(gate, [&](auto ordinary) {
#pragma unroll
    for (int at = 0; at < 4 * kCount; ++at) {
      const int r = at / 4;
      const int w = at % 4;
      const uint32_t d = grad[r].word[w];
      const uint32_t g = gate[r].word[w];
      const uint32_t u = up[r].word[w];
      constexpr bool kOrdinary = decltype(ordinary)::value;
      float s[Value::kPerWord];
      const uint32_t silu = map_word<Value>([&](int i) {
        const float x = Value::load(g, i);
        s[i] = sigmoid_of<kOrdinary>(x);
        if constexpr (kOrdinary && has_short_silu<Value>()) return __fmul_rn(x, s[i]);
        return silu_of<Value, kOrdinary>(x);
      });
      const uint32_t grad_silu = product_of<Value>(d, u);
      grad[r].word[w] = map_word<Value>([&](int i) {
        const float x = Value::load(g, i);
        return Value::load(grad_silu, i) * s[i] * (1.f + x * (1.f - s[i]));
      });
      gate[r].word[w] = product_of<Value>(d, silu);
      up[r].word[w] = product_of<Value>(silu, u);
    }
  });
}

/// The largest |silu(gate)| and |up| of a warp's rows of its tile, as fp32 bits: what
/// swiglu_maxima_numel (kernels/linear/swiglu_operand.h) counts after the product's amax.
struct StripMaxima {
  uint32_t silu;
  uint32_t up;

  template <int kThreads>
  __device__ static int64_t index() {
    static_assert(kThreads == 16 * 32, "a warp's rows are 8 of 128");
    const int64_t tile = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    return 1 + 2 * (tile * 16 + threadIdx.x / 32);
  }
  template <int kThreads>
  __device__ void store(float* maxima) const {
    maxima[index<kThreads>()] = __uint_as_float(silu);
    maxima[index<kThreads>() + 1] = __uint_as_float(up);
  }
  template <int kThreads>
  __device__ static StripMaxima load(const float* maxima) {
    return {__float_as_uint(maxima[index<kThreads>()]),
            __float_as_uint(maxima[index<kThreads>() + 1])};
  }

  /// Whether no gradient of the strip is above these amaxes, nor NaN, if no grad is above `grad`.
  template <typename Value>
  __device__ bool cannot_raise(uint32_t grad, uint32_t gate_amax, uint32_t up_amax) const {
    const float d = __uint_as_float(grad);
    // Rounding is monotonic. silu' is below 1.09984.
    const uint32_t of_up = rounded<Value>(d * __uint_as_float(silu));
    const uint32_t of_silu = rounded<Value>(d * __uint_as_float(up));
    const uint32_t of_gate = rounded<Value>(__uint_as_float(of_silu) * 1.1f);
    // Infinities may have been multiplied by zeros.
    return of_up < kInfBits && of_gate < kInfBits && of_up <= up_amax && of_gate <= gate_amax;
  }

 private:
  template <typename Value>
  __device__ static uint32_t rounded(float x) {
    return Value::amax_bits(Value::store(x), 0);
  }
};

/// The task of one tile of a group: nothing behind the group's end is read or written.
__device__ __forceinline__ SwigluTask of_group(SwigluTask task, const RowTile& tile) {
  task.m = tile.end;
  return task;
}
__device__ __forceinline__ ActivationTask of_group(ActivationTask task, const RowTile& tile) {
  task.m = tile.end;
  task.rows_written = tile.end;
  return task;
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
