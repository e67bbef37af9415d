// Cross entropy on CUDA tensors. Runs on the current device and stream.
#pragma once

#include "kernels/loss/cross_entropy.h"
#include "kernels/loss/cross_entropy_task.h"

namespace qshard::cuda {

void cross_entropy_losses(const CrossEntropyTask& task, at::ScalarType dtype);
void cross_entropy_gradient(const CrossEntropyTask& task, const at::Tensor& out);
QuantizedMatrix cross_entropy_codes(const CrossEntropyTask& task, const OperandRequest& request,
                                    const at::TensorOptions& logits);

}  // namespace qshard::cuda
