// The operators of kernels/norm/normalization.h, which run on CUDA devices only.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/device/check_launch.h"
#include "kernels/norm/task.h"

namespace qshard {

std::tuple<at::Tensor, at::Tensor> normalized(const at::Tensor& x, const Normalization& given) {
  const at::Tensor values = cuda::in_vectors(x);
  const Normalization norm = cuda::in_vectors(given);
  const at::Tensor statistics = cuda::empty_statistics(values, norm);
  cuda::NormTask task = cuda::norm_task(values, statistics, norm);
  const at::Tensor y = at::empty(x.sizes(), x.options());
  task.y = y.mutable_data_ptr();
  cuda::check_launch(cuda::launch_norm(task, c10::cuda::getCurrentCUDAStream()));
  return {y, statistics};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> normalization_gradients(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& statistics,
    const Normalization& given, bool needs_parameters, const at::Tensor& added) {
  const at::Tensor values = cuda::in_vectors(x);
  const Normalization norm = cuda::in_vectors(given);
  const at::Tensor grads = cuda::in_vectors(grad);
  cuda::NormTask task = cuda::norm_task(values, statistics, norm);
  task.grad = grads.const_data_ptr();
  const at::Tensor others = added.defined() ? cuda::in_vectors(added) : added;
  if (others.defined()) task.added = others.const_data_ptr();
  const at::Tensor grad_x = at::empty(x.sizes(), x.options());
  task.grad_x = grad_x.mutable_data_ptr();
  at::Tensor partials;  // (1 or 2, norm_partials, columns)
  if (needs_parameters) {
    const int64_t count = cuda::norm_partials(task);
    partials = at::empty({norm.rms ? 1 : 2, count, task.cols}, values.options().dtype(at::kFloat));
    task.grad_gamma = partials.mutable_data_ptr<float>();
    if (!norm.rms) task.grad_beta = task.grad_gamma + count * task.cols;
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  cuda::check_launch(cuda::launch_norm_backward(task, stream));
  const auto options = norm.weight.options();
  if (!needs_parameters) return {grad_x, at::empty({0}, options), at::empty({0}, options)};
  const at::Tensor sums = at::empty({norm.rms ? 1 : 2, task.cols}, options);
  cuda::check_launch(cuda::launch_norm_parameter_gradients(task, sums.mutable_data_ptr(), stream));
  return {grad_x, sums.select(0, 0), norm.rms ? at::empty({0}, options) : sums.select(0, 1)};
}

}  // namespace qshard
