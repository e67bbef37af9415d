// silu(gate) * up, the input of a linear: producers of its codes, and of the codes of its
// gradients. On CUDA devices the values are never stored where a linear reads packed codes.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "kernels/operand_producer.h"

namespace qshard {

/// silu(gate) * up, rounded as torch's two operators do. Tensors of one shape and dtype.
at::Tensor swiglu_values(const at::Tensor& gate, const at::Tensor& up);

/// The gradients of gate and up, as autograd's formulas for those operators round them.
std::pair<at::Tensor, at::Tensor> swiglu_gradients(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up);

/// silu(gate) * up of matrices (M, K), whose rows may be parts of longer ones.
class SwigluOperand final : public OperandProducer {
 public:
  /// amax: float32 (1,), of the values, if it is known: what their codes have one scale by.
  SwigluOperand(at::Tensor gate, at::Tensor up, at::Tensor amax = {})
      : OperandProducer(gate.options()),
        gate_(std::move(gate)),
        up_(std::move(up)),
        amax_(std::move(amax)) {}

  at::IntArrayRef sizes() const override { return gate_.sizes(); }
  QuantizedMatrix codes(const OperandRequest& request) const override;
  at::Tensor values(at::ScalarType dtype) const override;
  void collect_amax(const DelayedAmax& delayed) const override;

  /// The amax, if it was given or codes have been made by one.
  const at::Tensor& amax() const { return amax_; }

 private:
  at::Tensor gate_;
  at::Tensor up_;
  mutable at::Tensor amax_;
};

/// What is made of the gradient of silu(gate) * up.
struct SwigluBackwardRequest {
  OperandRequest gradients = {};  // packed codes of both gradients, not by earlier steps
  bool joined = false;            // as of one matrix (M, 2 K): that of gate, then that of up
  const Format* input = nullptr;  // columnwise codes of silu(gate) * up to meet a weight of it
  at::Tensor input_amax = {};     // what forward scaled them by, if by one scale
};

struct SwigluBackward {
  QuantizedMatrix gate = {};  // of both if joined
  QuantizedMatrix up = {};
  QuantizedMatrix input = {};
};

/// Codes of what the gradient `grad` (M, K) becomes; in one pass over the tensors, or in two where
/// codes have one scale. Where that kernel cannot, of the values: joined matrices whose K is no
/// multiple of 128.
/// @throws c10::Error on a device without FP8 GEMMs.
SwigluBackward swiglu_backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up,
                               const SwigluBackwardRequest& request);

}  // namespace qshard
