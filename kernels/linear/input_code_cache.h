// InputCodeCache: one quantization of an activation for all the linears that read it (q/k/v,
// gate/up).
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/linear/linear_fp8.h"

namespace qshard::cuda {

/// As quantize_activation(x, request) of an input without delayed scaling, where `x` is
/// `input.tensor` as a matrix. The tensor keeps the result as long as it lives. Later calls get the
/// same codes, on the stream and in the CUDA-graph capture that they were made in, until the tensor
/// gets another record or other memory (`.data = `).
///
/// The caller checks that the tensor is an activation that nothing wrote or can write unseen
/// (ops/linear/recorded_activation.h). Outside of captures only the default stream shares codes,
/// because it cannot be captured: a captured graph may write memory of other streams at each
/// replay.
QuantizedMatrix quantize_cached_activation(const SharedInput& input, const at::Tensor& x,
                                           const OperandRequest& request);

}  // namespace qshard::cuda
