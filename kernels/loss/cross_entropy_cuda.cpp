#include "kernels/loss/cross_entropy_cuda.h"

#include <c10/cuda/CUDAStream.h>

#include "kernels/device/check_launch.h"
#include "kernels/format/value_dtype.h"
#include "kernels/linear/packed_activation.h"
#include "kernels/loss/kernels.h"

namespace qshard::cuda {

void cross_entropy_losses(const CrossEntropyTask& task, at::ScalarType dtype) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  check_launch(launch_cross_entropy_losses(task, value_dtype(dtype), stream));
  check_launch(launch_cross_entropy_totals(task, stream));
}

void cross_entropy_gradient(const CrossEntropyTask& task, const at::Tensor& out) {
  check_launch(launch_cross_entropy_gradient(task, out.mutable_data_ptr(),
                                             value_dtype(out.scalar_type()),
                                             c10::cuda::getCurrentCUDAStream()));
}

QuantizedMatrix cross_entropy_codes(const CrossEntropyTask& task, const OperandRequest& request,
                                    const at::TensorOptions& logits) {
  const QuantizedMatrix out = empty_packed(task.m, task.v, request, logits.device());
  check_launch(launch_cross_entropy_codes(task, activation_task(out),
                                          !has_one_scale(*request.format),
                                          value_dtype(c10::typeMetaToScalarType(logits.dtype())),
                                          out.code_dtype, c10::cuda::getCurrentCUDAStream()));
  return out;
}

}  // namespace qshard::cuda
