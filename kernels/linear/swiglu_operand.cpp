#include "kernels/linear/swiglu_operand.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include <limits>

#include "kernels/linear/linear_amax.h"
#include "kernels/linear/swiglu_quantize.h"

namespace qshard {

at::Tensor swiglu_values(const at::Tensor& gate, const at::Tensor& up) {
  return at::mul(at::silu(gate), up);
}

std::pair<at::Tensor, at::Tensor> swiglu_gradients(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up) {
  return {at::silu_backward(at::mul(grad, up), gate), at::mul(grad, at::silu(gate))};
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
  if (is_fused) return cuda::quantize_swiglu(gate_, up_, request, maxima_);
  return PlainOperand(values(dtype())).codes(request);
}

at::Tensor SwigluOperand::values(at::ScalarType) const { return swiglu_values(gate_, up_); }

void SwigluOperand::collect_amax(const DelayedAmax& delayed) const {
  if (delayed) qshard::collect_amax(values(dtype()), delayed);
}

SwigluBackward swiglu_backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up,
                               const SwigluBackwardRequest& request) {
  if (cuda::can_quantize_swiglu_backward(gate, request)) {
    return cuda::quantize_swiglu_backward(grad, gate, up, request);
  }
  auto [grad_gate, grad_up] = swiglu_gradients(grad, gate, up);
  SwigluBackward result;
  if (request.joined) {
    result.gate = PlainOperand(at::cat({grad_gate, grad_up}, 1)).codes(request.gradients);
  } else {
    result.gate = PlainOperand(grad_gate).codes(request.gradients);
    result.up = PlainOperand(grad_up).codes(request.gradients);
  }
  if (request.input != nullptr) {
    result.input = SwigluOperand(gate, up, request.maxima)
                       .codes({.format = request.input, .orientations = {.columnwise = true}});
  }
  return result;
}

}  // namespace qshard
