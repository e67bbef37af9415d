// Codes of normalized rows, made in registers. Runs on the current device and stream.
#pragma once

#include "kernels/linear/operand_producer.h"
#include "kernels/norm/normalization.h"

namespace qshard::cuda {

/// As quantize_activation(normalized(x, norm), request) of a matrix that has_norm_kernel() is of.
/// `statistics`, as normalized() gives them, and `amax`, float32 (1,), of the normalized values:
/// undefined, they are computed where codes go by them, and left there.
QuantizedMatrix quantize_norm(const at::Tensor& x, const Normalization& norm,
                              const OperandRequest& request, at::Tensor& statistics,
                              at::Tensor& amax);

}  // namespace qshard::cuda
