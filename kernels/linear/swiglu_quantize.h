// Codes of silu(gate) * up, or of another activation, and of its gradients, made in registers. Runs
// on the current device and stream.
#pragma once

#include "kernels/linear/swiglu_operand.h"

namespace qshard::cuda {

/// As quantize_activation(silu(gate) * up, request); `up` may be undefined. `maxima`
/// (swiglu_maxima_numel) has the amax that one scale goes by; undefined, they are computed, and
/// left there. Delayed scaling collects the values' own, and leaves `maxima` alone.
QuantizedMatrix quantize_swiglu(const at::Tensor& gate, const at::Tensor& up, Activation activation,
                                const OperandRequest& request, at::Tensor& maxima);

/// Whether the kernel below makes what is asked for.
bool can_quantize_swiglu_backward(const at::Tensor& gate, const SwigluBackwardRequest& request);
SwigluBackward quantize_swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                        const at::Tensor& up, const SwigluBackwardRequest& request);

}  // namespace qshard::cuda
