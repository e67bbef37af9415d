// A head and its loss: cross_entropy(linear(input, weight), target), whose gradient leaves the loss
// as the codes that the linear's backward reads.
#pragma once

#include "ops/calls/ops.h"

namespace qshard {

using OptionalFormat = std::optional<c10::string_view>;

/// ops/loss/linear_cross_entropy.cpp. `weight_state`: given, the weight is plain (ops.h).
Tensor linear_cross_entropy(const Tensor& input, const Tensor& weight, const Tensor& target,
                            const OptionalTensor& bias, c10::string_view reduction,
                            int64_t ignore_index, double label_smoothing, OptionalFormat format,
                            const WeightState& weight_state, OptionalFormat forward_precision);
Tensor linear_cross_entropy_autograd(const Tensor& input, const Tensor& weight,
                                     const Tensor& target, const OptionalTensor& bias,
                                     c10::string_view reduction, int64_t ignore_index,
                                     double label_smoothing, OptionalFormat format,
                                     const WeightState& weight_state,
                                     OptionalFormat forward_precision);
Tensor linear_cross_entropy_meta(const Tensor& input, const Tensor& weight, const Tensor& target,
                                 const OptionalTensor& bias, c10::string_view reduction,
                                 int64_t ignore_index, double label_smoothing,
                                 OptionalFormat format, const WeightState& weight_state,
                                 OptionalFormat forward_precision);

/// ops/loss/cross_entropy.cpp: (losses, totals, rows, columns) as kernels/loss/cross_entropy.h has
/// them. `grad_format`: of the weight that the codes meet, or none for the gradient in values.
std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_and_gradient(
    const Tensor& logits, const Tensor& target, int64_t ignore_index, double label_smoothing,
    OptionalFormat grad_format, bool rows, bool columns);
std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_and_gradient_meta(
    const Tensor& logits, const Tensor& target, int64_t ignore_index, double label_smoothing,
    OptionalFormat grad_format, bool rows, bool columns);

/// @throws naming `op` for a smoothing outside [0, 1], and for targets that are not int64 of the
/// sizes of `x` (..., columns) without the last.
void check_targets(const char* op, const Tensor& x, const Tensor& target, double label_smoothing);

}  // namespace qshard
