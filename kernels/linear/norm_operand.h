// Normalized rows, the input of a linear: a producer of their codes. On CUDA devices the values are
// never stored where a linear reads packed codes.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "kernels/linear/operand_producer.h"
#include "kernels/norm/normalization.h"

namespace qshard {

/// The rows of x (M, K), normalized.
class NormOperand final : public OperandProducer {
 public:
  /// What is known of them already: `statistics` as normalized() gives them, and `amax`, float32
  /// (1,), of the normalized values.
  NormOperand(at::Tensor x, Normalization norm, at::Tensor statistics = {}, at::Tensor amax = {})
      : OperandProducer(x.options()),
        x_(std::move(x)),
        norm_(std::move(norm)),
        statistics_(std::move(statistics)),
        amax_(std::move(amax)) {}

  at::IntArrayRef sizes() const override { return x_.sizes(); }
  QuantizedMatrix codes(const OperandRequest& request) const override;
  at::Tensor values(at::ScalarType dtype) const override;
  void collect_amax(const DelayedAmax& delayed) const override;

  /// The statistics, if they were given, or a kernel has made codes or values. Torch's operators,
  /// which compute what has_norm_kernel() refuses, leave none.
  const at::Tensor& statistics() const { return statistics_; }
  /// The amax, if it was given or codes have been made by one.
  const at::Tensor& amax() const { return amax_; }

 private:
  at::Tensor x_;
  Normalization norm_;
  mutable at::Tensor statistics_;
  mutable at::Tensor amax_;
};

}  // namespace qshard
