// Activations of MLPs and their gradients, of tiles in registers: silu(gate) * up, those that
// multiply another activation of gate, and those of gate alone.
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

struct OrdinaryReciprocal {
  __device__ __forceinline__ float operator()(float divisor) const {
    return ordinary_reciprocal(divisor);
  }
};

// What kernels are compiled for. value() is the activation of x, yet to be rounded to `Value`, and
// leaves in `kept` what gradient() reads; `kOrdinary`: |x| < ordinary().

/// silu(gate) * up. Vectors are aligned and whole, or none is.
template <bool kVectorized>
struct Swiglu {
  static constexpr bool kGated = true;
  static constexpr bool kDivides = true;

  __device__ __forceinline__ explicit Swiglu(const SwigluTask&) {}
  __device__ __forceinline__ constexpr bool vectorized() const { return kVectorized; }
  __device__ __forceinline__ constexpr float ordinary() const { return kOrdinaryGate; }

  template <typename Value, bool kOrdinary>
  __device__ __forceinline__ float value(float x) const {
    return silu_of<Value, kOrdinary>(x);
  }
  template <typename Value, bool kOrdinary>
  __device__ __forceinline__ float value(float x, float& kept) const {
    kept = sigmoid_of<kOrdinary>(x);
    if constexpr (kOrdinary && has_short_silu<Value>()) return __fmul_rn(x, kept);
    return silu_of<Value, kOrdinary>(x);
  }
  __device__ __forceinline__ float gradient(float grad, float x, float kept) const {
    return grad * kept * (1.f + x * (1.f - kept));
  }
  /// No derivative is larger where no |value| is above `largest`.
  __device__ __forceinline__ float steepest(float) const { return 1.1f; }  // silu' < 1.09984
};

/// The others, whose bits kernels/numerics/activations.h defines.
template <bool kHasUp>
struct AnyActivation {
  static constexpr bool kGated = kHasUp;

  __device__ __forceinline__ explicit AnyActivation(const SwigluTask& task)
      : vectorized_(task.vectorized) {}
  __device__ __forceinline__ bool vectorized() const { return vectorized_; }

 private:
  bool vectorized_;
};

/// silu or gelu.
template <bool kHasUp>
struct OfSigmoid : AnyActivation<kHasUp> {
  static constexpr bool kDivides = true;

  __device__ __forceinline__ explicit OfSigmoid(const SwigluTask& task)
      : AnyActivation<kHasUp>(task), gate(sigmoid_gate(task.activation)) {}
  __device__ __forceinline__ float ordinary() const { return gate.ordinary; }

  template <typename Value, bool kOrdinary>
  __device__ __forceinline__ float value(float x) const {
    float kept;
    return value<Value, kOrdinary>(x, kept);
  }
  template <typename Value, bool kOrdinary>
  __device__ __forceinline__ float value(float x, float& kept) const {
    if constexpr (kOrdinary) {
      kept = gate.sigmoid(x, OrdinaryReciprocal{});
    } else {
      kept = gate.sigmoid(x);
    }
    return gate.value(x, kept);
  }
  __device__ __forceinline__ float gradient(float grad, float x, float kept) const {
    return __fmul_rn(grad, gate.derivative(x, kept));
  }
  __device__ __forceinline__ float steepest(float) const { return gate.steepest; }

  SigmoidGate gate;
};

/// relu or its square.
template <bool kHasUp>
struct OfRelu : AnyActivation<kHasUp> {
  static constexpr bool kDivides = false;

  __device__ __forceinline__ explicit OfRelu(const SwigluTask& task)
      : AnyActivation<kHasUp>(task), gate{task.activation == Activation::kSquaredRelu} {}

  template <typename, bool>
  __device__ __forceinline__ float value(float x) const {
    return gate.value(x);
  }
  template <typename, bool>
  __device__ __forceinline__ float value(float x, float&) const {
    return gate.value(x);
  }
  __device__ __forceinline__ float gradient(float grad, float x, float) const {
    return gate.gradient(grad, x);
  }
  __device__ __forceinline__ float steepest(float largest) const {
    // 2 x of x^2. The sum: x is up to 1.8e-4 where float16 has rounded its square to 0.
    return gate.squared ? 2.02f * (sqrtf(largest) + 2e-4f) : 1.f;
  }

  ReluGate gate;
};

/// Calls run(std::bool_constant{}) with whether kCount gates are ordinary.
template <int kCount, typename Kind, typename Value, typename Run>
__device__ __forceinline__ void with_gates(const Kind& kind, const Vector<Value>* gates,
                                           const Run& run) {
  if constexpr (!Kind::kDivides) {
    run(std::true_type{});
  } else if (largest_of<Value, kCount>(gates) < __float_as_uint(kind.ordinary())) {
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

/// gate becomes silu(gate) * up, or what `kind` has in its place. silu(gate) is rounded as a tensor
/// of its own would be; seen(word) is called with each word of it.
template <typename Kind, typename Value, int kThreads, typename Seen>
__device__ __forceinline__ void swiglu(const Kind& kind, ActivationTile<Value, kThreads>& gate,
                                       const ActivationTile<Value, kThreads>& up,
                                       const Seen& seen) {
  constexpr int kRows = ActivationTile<Value, kThreads>::kRows;
  with_gates<kRows>(kind, gate.values, [&](auto ordinary) {
#pragma unroll
    for (int at = 0; at < 4 * kRows; ++at) {
      const int r = at / 4;
      const int w = at % 4;
      const uint32_t g = gate.values[r].word[w];
      const uint32_t silu = map_word<Value>([&](int i) {
        return kind.template value<Value, decltype(ordinary)::value>(Value::load(g, i));
      });
      seen(silu);
      if constexpr (Kind::kGated) {
        gate.values[r].word[w] = product_of<Value>(silu, up.values[r].word[w]);
      } else {
        gate.values[r].word[w] = silu;
      }
    }
  });
}

/// kCount vectors of (grad, gate, up) become the gradients of gate and of up, and silu(gate) * up.
/// Without up (grad, gate, -) become the gradient of gate, gate, and silu(gate).
template <int kCount, typename Kind, typename Value>
__device__ __forceinline__ void swiglu_backward(const Kind& kind, Vector<Value>* grad,
                                                Vector<Value>* gate, Vector<Value>* up) {
  with_gates<kCount>(kind, gate, [&](auto ordinary) {
#pragma unroll
    for (int at = 0; at < 4 * kCount; ++at) {
      const int r = at / 4;
      const int w = at % 4;
      const uint32_t d = grad[r].word[w];
      const uint32_t g = gate[r].word[w];
      constexpr bool kOrdinary = decltype(ordinary)::value;
      float kept[Value::kPerWord] = {};
      const uint32_t silu = map_word<Value>(
          [&](int i) { return kind.template value<Value, kOrdinary>(Value::load(g, i), kept[i]); });
      uint32_t grad_silu = d;
      if constexpr (Kind::kGated) grad_silu = product_of<Value>(d, up[r].word[w]);
      grad[r].word[w] = map_word<Value>([&](int i) {
        return kind.gradient(Value::load(grad_silu, i), Value::load(g, i), kept[i]);
      });
      if constexpr (Kind::kGated) {
        gate[r].word[w] = product_of<Value>(d, silu);
        up[r].word[w] = product_of<Value>(silu, up[r].word[w]);
      } else {
        up[r].word[w] = silu;
      }
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
  template <typename Value, typename Kind>
  __device__ bool cannot_raise(const Kind& kind, uint32_t grad, uint32_t gate_amax,
                               uint32_t up_amax) const {
    const float d = __uint_as_float(grad);
    const float steepest = kind.steepest(__uint_as_float(silu));
    // Rounding is monotonic. Infinities may have been multiplied by zeros.
    if constexpr (Kind::kGated) {
      const uint32_t of_up = rounded<Value>(d * __uint_as_float(silu));
      const uint32_t of_silu = rounded<Value>(d * __uint_as_float(up));
      const uint32_t of_gate = rounded<Value>(__uint_as_float(of_silu) * steepest);
      return of_up < kInfBits && of_gate < kInfBits && of_up <= up_amax && of_gate <= gate_amax;
    } else {
      const uint32_t of_gate = rounded<Value>(d * steepest);
      return silu < kInfBits && of_gate < kInfBits && of_gate <= gate_amax;
    }
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

template <typename Kind>
struct KindOf {
  using Type = Kind;
};

inline bool has_vectors(const SwigluTask& task, DType dtype) {
  const int64_t size = value_size(dtype);
  const auto is_aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  return is_aligned(task.gate) && is_aligned(task.up) && is_aligned(task.grad) &&
         task.k * size % 16 == 0 && task.ld_gate * size % 16 == 0 && task.ld_up * size % 16 == 0;
}

/// Calls run(Value{}, KindOf<Swiglu>{}) with the type of `dtype`, and whether vectors are aligned
/// and whole.
template <typename Run>
cudaError_t with_swiglu_types(const SwigluTask& task, DType dtype, const Run& run) {
  return with_value_type(dtype, [&](auto value) {
    return has_vectors(task, dtype) ? run(value, KindOf<Swiglu<true>>{})
                                    : run(value, KindOf<Swiglu<false>>{});
  });
}

/// Calls run(Value{}, KindOf{}, task) with the type of `dtype`, and what the task's activation is
/// compiled as.
template <typename Run>
cudaError_t with_activation_types(SwigluTask task, DType dtype, const Run& run) {
  const bool gated = task.up != nullptr;
  if (gated && task.activation == Activation::kSilu) {
    return with_swiglu_types(task, dtype,
                             [&](auto value, auto kind) { return run(value, kind, task); });
  }
  task.vectorized = has_vectors(task, dtype);
  const bool is_relu =
      task.activation == Activation::kRelu || task.activation == Activation::kSquaredRelu;
  return with_value_type(dtype, [&](auto value) {
    if (is_relu) {
      return gated ? run(value, KindOf<OfRelu<true>>{}, task)
                   : run(value, KindOf<OfRelu<false>>{}, task);
    }
    return gated ? run(value, KindOf<OfSigmoid<true>>{}, task)
                 : run(value, KindOf<OfSigmoid<false>>{}, task);
  });
}

}  // namespace qshard::cuda
