#include "kernels/linear/swiglu_operand.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/square.h>
#include <ATen/ops/threshold_backward.h>

#include <limits>

#include "kernels/linear/linear_amax.h"
#include "kernels/linear/swiglu_quantize.h"

namespace qshard {

namespace {

constexpr const char* kTanh = "tanh";

at::Tensor activated(const at::Tensor& gate, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return at::silu(gate);
    case Activation::kGelu:
      return at::gelu(gate, kTanh);
    case Activation::kRelu:
      return at::relu(gate);
    case Activation::kSquaredRelu:
      return at::square(at::relu(gate));
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor gradient_of_activation(const at::Tensor& grad, const at::Tensor& gate,
                                  Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return at::silu_backward(grad, gate);
    case Activation::kGelu:
      return at::gelu_backward(grad, gate, kTanh);
    case Activation::kRelu:
      return at::threshold_backward(grad, at::relu(gate), 0);
    case Activation::kSquaredRelu: {
      const at::Tensor positive = at::relu(gate);
      return at::threshold_backward(at::mul(grad, at::mul(positive, 2)), positive, 0);
    }
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace

at::Tensor swiglu_values(const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  const at::Tensor values = activated(gate, activation);
  return up.defined() ? at::mul(values, up) : values;
}

std::pair<at::Tensor, at::Tensor> swiglu_gradients(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up, Activation activation) {
  if (!up.defined()) return {gradient_of_activation(grad, gate, activation), at::Tensor()};
  return {gradient_of_activation(at::mul(grad, up), gate, activation),
          at::mul(grad, activated(gate, activation))};
}

at::Tensor swiglu_maxima(const at::Tensor& amax, int64_t m, int64_t k) {
  at::Tensor maxima =
      at::full({swiglu_maxima_numel(m, k)}, std::numeric_limits<float>::infinity(), amax.options());
  maxima.narrow(0, 0, 1).copy_(amax);
  return maxima;
}

QuantizedMatrix SwigluOperand::codes(const OperandRequest& request) const {
  const bool is_fused = gate_.is_cuda() && request.operand_layout == OperandLayout::kPacked &&
                        request.role == OperandRole::kInput && !has_scale_per_row(*request.format);
  if (is_fused) return cuda::quantize_swiglu(gate_, up_, activation_, request, maxima_);
  return PlainOperand(values(dtype())).codes(request);
}

at::Tensor SwigluOperand::values(at::ScalarType) const {
  return swiglu_values(gate_, up_, activation_);
}

void SwigluOperand::collect_amax(const DelayedAmax& delayed) const {
  if (delayed) qshard::collect_amax(values(dtype()), delayed);
}

void sum_columns(const at::Tensor& grad_gate, const at::Tensor& grad_up, const at::Tensor& sums) {
  const int64_t k = grad_gate.size(1);
  sums.narrow(0, 0, k).copy_(grad_gate.sum(0, /*keepdim=*/false, at::kFloat));
  if (grad_up.defined()) sums.narrow(0, k, k).copy_(grad_up.sum(0, /*keepdim=*/false, at::kFloat));
}

SwigluBackward swiglu_backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up,
                               const SwigluBackwardRequest& request) {
  if (cuda::can_quantize_swiglu_backward(gate, request)) {
    return cuda::quantize_swiglu_backward(grad, gate, up, request);
  }
  auto [grad_gate, grad_up] = swiglu_gradients(grad, gate, up, request.activation);
  if (request.column_sums.defined()) sum_columns(grad_gate, grad_up, request.column_sums);
  SwigluBackward result;
  if (request.joined) {
    result.gate = PlainOperand(at::cat({grad_gate, grad_up}, 1)).codes(request.gradients);
  } else {
    result.gate = PlainOperand(grad_gate).codes(request.gradients);
    if (up.defined()) result.up = PlainOperand(grad_up).codes(request.gradients);
  }
  if (request.input != nullptr) {
    result.input = SwigluOperand(gate, up, request.maxima, request.activation)
                       .codes({.format = request.input, .orientations = {.columnwise = true}});
  }
  return result;
}

}  // namespace qshard
