#include "kernels/linear/norm_quantize.h"

#include <c10/cuda/CUDAStream.h>

#include "kernels/device/check_launch.h"
#include "kernels/linear/packed_activation.h"
#include "kernels/norm/quantize_kernels.h"
#include "kernels/norm/task.h"
#include "kernels/scaling/scaling_state_cuda.h"

namespace qshard::cuda {

QuantizedMatrix quantize_norm(const at::Tensor& x, const Normalization& given,
                              const OperandRequest& request, at::Tensor& statistics,
                              at::Tensor& amax) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor values = in_vectors(x);
  const Normalization norm = in_vectors(given);
  const bool has_statistics = statistics.defined();
  if (!has_statistics) statistics = empty_statistics(values, norm);
  const NormTask task = norm_task(values, statistics, norm);
  const QuantizedMatrix out = empty_packed(x.size(0), x.size(1), request, x.device());
  const ActivationTask codes = activation_task(out);
  const bool one_scale = has_one_scale(*request.format);
  if (!one_scale && !has_statistics && can_quantize_norm_rows(task, codes)) {
    check_launch(launch_norm_quantize_rows(task, codes, stream));
    return out;
  }
  const bool needs_amax = one_scale && !amax.defined();
  if (needs_amax) amax = no_amax(1, x.device());
  if (needs_amax || !has_statistics) {
    auto* raised = needs_amax ? amax.mutable_data_ptr<float>() : nullptr;
    check_launch(launch_norm_statistics(task, raised, stream));
  }
  at::Tensor in_use = amax;
  if (request.delayed) {
    in_use = amax.clone();
    delay_amax(in_use.mutable_data_ptr<float>(), request.delayed, stream.stream());
  }
  const float* scaled_by = one_scale ? in_use.const_data_ptr<float>() : nullptr;
  check_launch(launch_norm_quantize(task, codes, scaled_by, stream));
  return out;
}

}  // namespace qshard::cuda
