// One quantization of an activation for all the linears that read it (q/k/v, gate/up).
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/linear/linear_fp8.h"

namespace qshard::cuda {

/// As quantize_activation(x, request) of an input without delayed scaling, where `x` is
/// `input.tensor` as a matrix. The result stays with that tensor and goes when it goes. It serves
/// again until the tensor gets another record or other memory (`.data = `), on the stream and in
/// the CUDA-graph capture it was made in.
///
/// The tensor must be an activation that nothing wrote or can write unseen: the caller knows
/// (ops/linear/recorded_activation.h). Memory that a captured graph writes at each replay is told
/// by its stream: the default stream cannot be captured, and outside of captures codes are shared
/// there alone.
QuantizedMatrix quantize_shared_activation(const SharedInput& input, const at::Tensor& x,
                                           const OperandRequest& request);

}  // namespace qshard::cuda
