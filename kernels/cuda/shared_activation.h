// One quantization of an activation for all the linears that read it (q/k/v, gate/up).
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/cuda/linear_fp8.h"

namespace qshard::cuda {

/// As quantize_activation(x, format, E4M3, rows, columns) without delayed scaling, where `x` is
/// `owner` as a matrix. The result stays with `owner` and goes when it goes. It serves again until
/// `owner` is written in place (version counter), on the stream and in the CUDA-graph capture it
/// was made in. Writes through `.data` or below the dispatcher are not seen, as autograd's own
/// check does not see them; so compiled code, which writes its buffers that way, must not get here.
Fp8Activation quantize_shared_activation(const at::Tensor& owner, const at::Tensor& x,
                                         const Format& format, bool rows, bool columns);

}  // namespace qshard::cuda
