// silu(gate) * up, the input of a linear, and what other activations make of gate and up or of gate
// alone: producers of its codes, and of the codes of its gradients. On CUDA devices the values are
// never stored where a linear reads packed codes.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "kernels/linear/operand_producer.h"
#include "kernels/numerics/activations.h"

namespace qshard {

/// silu(gate) * up, rounded as torch's two operators do. Tensors of one shape and dtype. `up` may
/// be undefined: the activation of gate alone.
at::Tensor swiglu_values(const at::Tensor& gate, const at::Tensor& up,
                         Activation activation = Activation::kSilu);

/// The gradients of gate and up, as autograd's formulas for those operators round them.
std::pair<at::Tensor, at::Tensor> swiglu_gradients(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up,
                                                   Activation activation = Activation::kSilu);

/// What is remembered of matrices (M, K) of gate and up, float32: the amax of silu(gate) * up, by
/// which codes have one scale, then of each strip of 8x128 the largest |silu(gate)| and the largest
/// |up|; strips of a tile of 128x128 one after the other, and tiles row by row. With those backward
/// finds the amaxes of the gradients of gate and up without reading most strips of either: where
/// the largest factors multiply to less than the amax so far, no product can raise it. Infinities
/// stand for what is not known. Int: int64_t, or c10::SymInt of what is traced.
template <typename Int>
Int swiglu_maxima_numel(const Int& m, const Int& k) {
  return (m + 127) / 128 * ((k + 127) / 128) * (2 * 16) + 1;
}
/// The same of an amax alone, float32 (1,).
at::Tensor swiglu_maxima(const at::Tensor& amax, int64_t m, int64_t k);

/// silu(gate) * up of matrices (M, K), whose rows may be parts of longer ones. Codes of other
/// activations are those of kernels/numerics/activations.h, which is closer to GELU's formula than
/// torch's operator is below -3.
class SwigluOperand final : public OperandProducer {
 public:
  /// maxima: those of swiglu_maxima_numel(), if they are known.
  SwigluOperand(at::Tensor gate, at::Tensor up, at::Tensor maxima = {},
                Activation activation = Activation::kSilu)
      : OperandProducer(gate.options()),
        gate_(std::move(gate)),
        up_(std::move(up)),
        maxima_(std::move(maxima)),
        activation_(activation) {}

  at::IntArrayRef sizes() const override { return gate_.sizes(); }
  QuantizedMatrix codes(const OperandRequest& request) const override;
  at::Tensor values(at::ScalarType dtype) const override;
  void collect_amax(const DelayedAmax& delayed) const override;

  /// The maxima, if they were given or codes have been made by them.
  const at::Tensor& maxima() const { return maxima_; }

 private:
  at::Tensor gate_;
  at::Tensor up_;
  mutable at::Tensor maxima_;
  Activation activation_;
};

/// What is made of the gradient of silu(gate) * up.
struct SwigluBackwardRequest {
  OperandRequest gradients = {};  // packed codes of both gradients, not by earlier steps
  bool joined = false;            // as of one matrix (M, 2 K): that of gate, then that of up
  Activation activation = Activation::kSilu;
  const Format* input = nullptr;  // columnwise codes of silu(gate) * up to meet a weight of it
  at::Tensor maxima = {};         // what forward knew of gate and up, if it scaled by one scale
  /// float32 (2 K,), or (K,) without up, or undefined: left with the sums of gradients over rows.
  at::Tensor column_sums = {};
};

struct SwigluBackward {
  QuantizedMatrix gate = {};  // of both if joined
  QuantizedMatrix up = {};    // nothing if joined, or without up
  QuantizedMatrix input = {};
};

/// Sets `sums`, as SwigluBackwardRequest has them, as torch adds up matrices of values.
void sum_columns(const at::Tensor& grad_gate, const at::Tensor& grad_up, const at::Tensor& sums);

/// Codes of what the gradient `grad` (M, K) becomes; in one pass over the tensors, or in two where
/// codes have one scale. Where that kernel cannot, of the values: joined matrices whose K is no
/// multiple of 128.
/// @throws c10::Error on a device without FP8 GEMMs, unless they are emulated.
SwigluBackward swiglu_backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up,
                               const SwigluBackwardRequest& request);

}  // namespace qshard
