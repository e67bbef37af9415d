#include "kernels/normalization.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include "kernels/value_dtype.h"
#ifdef QSHARD_WITH_CUDA
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/check_launch.h"
#include "kernels/cuda/normalization_kernels.h"
#endif

namespace qshard {

#ifdef QSHARD_WITH_CUDA
namespace {

cuda::NormTask task_of(const at::Tensor& x, const at::Tensor& statistics,
                       const Normalization& norm) {
  cuda::NormTask task;
  task.x = x.const_data_ptr();
  task.gamma = norm.weight.const_data_ptr();
  task.gamma_dtype = value_dtype(norm.weight.scalar_type());
  if (norm.bias.defined()) task.beta = norm.bias.const_data_ptr();
  task.cols = static_cast<int>(x.size(-1));
  task.rows = x.numel() / task.cols;
  task.rstd = static_cast<float*>(statistics.mutable_data_ptr());
  if (!norm.rms) task.mean = task.rstd + task.rows;
  task.eps = norm.eps;
  task.zero_centered_gamma = norm.zero_centered_gamma;
  task.dtype = value_dtype(x.scalar_type());
  return task;
}

// In vectors from the first value on.
at::Tensor in_vectors(const at::Tensor& x) {
  const at::Tensor dense = x.contiguous();
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> normalized(const at::Tensor& x, const Normalization& norm) {
  const at::Tensor values = in_vectors(x);
  const int64_t rows = values.numel() / values.size(-1);
  const at::Tensor statistics =
      at::empty({norm.rms ? 1 : 2, rows}, values.options().dtype(at::kFloat));
  cuda::NormTask task = task_of(values, statistics, norm);
  const at::Tensor y = at::empty(x.sizes(), x.options());
  task.y = y.mutable_data_ptr();
  cuda::check_launch(cuda::launch_norm(task, c10::cuda::getCurrentCUDAStream()));
  return {y, statistics};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> normalization_gradients(const at::Tensor& grad,
                                                                       const at::Tensor& x,
                                                                       const at::Tensor& statistics,
                                                                       const Normalization& norm,
                                                                       bool needs_parameters) {
  const at::Tensor values = in_vectors(x);
  const at::Tensor grads = in_vectors(grad);
  cuda::NormTask task = task_of(values, statistics, norm);
  task.grad = grads.const_data_ptr();
  const at::Tensor grad_x = at::empty(x.sizes(), x.options());
  task.grad_x = grad_x.mutable_data_ptr();
  at::Tensor partials;  // (1 or 2, norm_partials, columns)
  if (needs_parameters) {
    const int64_t count = cuda::norm_partials(task);
    partials = at::empty({norm.rms ? 1 : 2, count, task.cols}, values.options().dtype(at::kFloat));
    task.grad_gamma = partials.mutable_data_ptr<float>();
    if (!norm.rms) task.grad_beta = task.grad_gamma + count * task.cols;
  }
  cuda::check_launch(cuda::launch_norm_backward(task, c10::cuda::getCurrentCUDAStream()));
  const auto options = norm.weight.options();
  if (!needs_parameters) return {grad_x, at::empty({0}, options), at::empty({0}, options)};
  const at::Tensor sums = at::sum(partials, {1}).to(options.dtype());
  return {grad_x, sums.select(0, 0), norm.rms ? at::empty({0}, options) : sums.select(0, 1)};
}
#else
namespace {

[[noreturn]] void no_cuda() {
  TORCH_CHECK(false,
              "qshard: cannot normalize on CUDA: this library was built without CUDA (nvcc was not "
              "found)");
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> normalized(const at::Tensor&, const Normalization&) {
  no_cuda();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> normalization_gradients(const at::Tensor&,
                                                                       const at::Tensor&,
                                                                       const at::Tensor&,
                                                                       const Normalization&, bool) {
  no_cuda();
}
#endif

}  // namespace qshard
