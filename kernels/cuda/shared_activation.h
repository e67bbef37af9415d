// One quantization of an activation for all the linears that read it (q/k/v, gate/up).
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/cuda/linear_fp8.h"

namespace qshard::cuda {

/// As quantize_activation(x, format, E4M3, rows, columns) without delayed scaling, where `x` is
/// `owner` as a matrix. The result stays with `owner` and goes when it goes. It serves again until
/// `owner` is written in place (version counter), on the stream and in the CUDA-graph capture it
/// was made in. Writes below the dispatcher move no counter, so `owner` must be a tensor that
/// autograd records: neither a buffer of compiled code nor one that inference fills again.
Fp8Activation quantize_shared_activation(const at::Tensor& owner, const at::Tensor& x,
                                         const Format& format, bool rows, bool columns);

}  // namespace qshard::cuda
