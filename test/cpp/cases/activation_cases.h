// The activations of MLPs, and their values and gradients by kernels/numerics/activations.h on the
// CPU: what kernels compute bit by bit.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "kernels/linear/swiglu_operand.h"

namespace qshard::testing {

struct ActivationCase {
  const char* name;
  Activation activation;
  bool gated;
};
inline constexpr ActivationCase kSwigluCase = {"swiglu", Activation::kSilu, true};
inline constexpr ActivationCase kOtherActivations[] = {
    {"silu", Activation::kSilu, false},        {"gelu", Activation::kGelu, false},
    {"geglu", Activation::kGelu, true},        {"relu", Activation::kRelu, false},
    {"reglu", Activation::kRelu, true},        {"srelu", Activation::kSquaredRelu, false},
    {"sreglu", Activation::kSquaredRelu, true}};

namespace detail {

template <typename T>
float rounded_to(float x) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    return bits_float(uint32_t{float_to_bfloat16(x)} << 16);
  } else {
    return static_cast<float>(static_cast<T>(x));
  }
}

inline float value_of(Activation activation, float x) {
  if (activation == Activation::kRelu || activation == Activation::kSquaredRelu) {
    return ReluGate{activation == Activation::kSquaredRelu}.value(x);
  }
  const SigmoidGate gate = sigmoid_gate(activation);
  return gate.value(x, gate.sigmoid(x));
}

inline float gradient_of(Activation activation, float grad, float x) {
  if (activation == Activation::kRelu || activation == Activation::kSquaredRelu) {
    return ReluGate{activation == Activation::kSquaredRelu}.gradient(grad, x);
  }
  const SigmoidGate gate = sigmoid_gate(activation);
  return qshard::detail::multiply(grad, gate.derivative(x, gate.sigmoid(x)));
}

/// f(x, y, z) of the elements of tensors, rounded; NaNs have the sign that they have on GPUs.
template <typename F>
at::Tensor map_elements(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z, const F& f) {
  const auto on_cpu = [](const at::Tensor& t) { return t.cpu().contiguous(); };
  const at::Tensor a = on_cpu(x), b = on_cpu(y.defined() ? y : x), c = on_cpu(z.defined() ? z : x);
  at::Tensor out = at::empty_like(a);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "map_elements", [&] {
    const auto *p = a.const_data_ptr<scalar_t>(), *q = b.const_data_ptr<scalar_t>(),
               *r = c.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, out.numel(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto round = [](float x) { return rounded_to<scalar_t>(x); };
        to[i] = static_cast<scalar_t>(canonical_nan(f(
            static_cast<float>(p[i]), static_cast<float>(q[i]), static_cast<float>(r[i]), round)));
      }
    });
  });
  return out.to(x.device());
}

}  // namespace detail

/// swiglu_values() as kernels make them.
inline at::Tensor values_by_kernel(const ActivationCase& of, const at::Tensor& gate,
                                   const at::Tensor& up) {
  return detail::map_elements(gate, up, {}, [&](float x, float u, float, const auto& round) {
    const float value = round(detail::value_of(of.activation, x));
    return of.gated ? round(value * u) : value;
  });
}

/// swiglu_gradients() as kernels make them.
inline std::pair<at::Tensor, at::Tensor> gradients_by_kernel(const ActivationCase& of,
                                                             const at::Tensor& grad,
                                                             const at::Tensor& gate,
                                                             const at::Tensor& up) {
  at::Tensor of_gate =
      detail::map_elements(gate, up, grad, [&](float x, float u, float d, const auto& round) {
        return round(detail::gradient_of(of.activation, of.gated ? round(d * u) : d, x));
      });
  if (!of.gated) return {of_gate, at::Tensor()};
  return {of_gate,
          detail::map_elements(gate, {}, grad, [&](float x, float, float d, const auto& round) {
            return round(d * round(detail::value_of(of.activation, x)));
          })};
}

/// The sums of a gradient's columns, in the order that launch_swiglu_backward_quantize and
/// launch_swiglu_column_sums name.
inline at::Tensor column_sums_by_kernel(const at::Tensor& x) {
  if (x.size(0) == 0) return at::zeros({x.size(1)}, x.options().dtype(at::kFloat));
  const bool is_wide = x.scalar_type() == at::kFloat;
  const int64_t tiles = ceil_div(x.size(0), 128);
  const at::Tensor padded =
      at::constant_pad_nd(x.cpu().to(at::kFloat), {0, 0, 0, tiles * 128 - x.size(0)});
  // One after the other, along a dimension.
  const auto in_turn = [](const at::Tensor& of, int64_t dim) {
    at::Tensor sum = of.select(dim, 0).clone();
    for (int64_t i = 1; i < of.size(dim); ++i) sum.add_(of.select(dim, i));
    return sum;
  };
  const int64_t at_once = is_wide ? 8 : 4;
  const at::Tensor some =
      in_turn(padded.view({tiles, 16, 8 / at_once, at_once, x.size(1)}), /*dim=*/3);
  const at::Tensor of_tiles = in_turn(in_turn(some, 2), 1);
  const int64_t eighths = ceil_div(tiles, 8);
  const at::Tensor of_eighths = in_turn(
      at::constant_pad_nd(of_tiles, {0, 0, 0, eighths * 8 - tiles}).view({eighths, 8, x.size(1)}),
      0);
  return in_turn(of_eighths, 0).to(x.device());
}

}  // namespace qshard::testing
