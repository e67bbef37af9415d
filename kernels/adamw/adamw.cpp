#include "kernels/adamw/adamw.h"

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "kernels/adamw/adamw_cuda.h"

namespace qshard {
namespace {

at::Tensor tensor_over(void* data, int64_t numel, DType dtype) {
  const auto type = dtype == DType::kFloat32    ? at::kFloat
                    : dtype == DType::kBFloat16 ? at::kBFloat16
                                                : at::kHalf;
  return at::from_blob(data, {numel}, at::TensorOptions().dtype(type));
}

at::Tensor scalar_over(const float* data) {
  return at::from_blob(const_cast<float*>(data), {}, at::TensorOptions().dtype(at::kFloat));
}

std::optional<at::Tensor> optional_scalar(const float* data) {
  return data ? std::optional(scalar_over(data)) : std::nullopt;
}

/// torch's own kernel, then the passes that a GPU saves.
void fused_adamw_cpu(std::span<const AdamWTask> tasks, const AdamWOptions& options) {
  std::vector<at::Tensor> parameters, grads, exp_avgs, exp_avg_sqs, steps;
  std::vector<QuantizeTask> all, to_encode;
  for (const AdamWTask& task : tasks) {
    const int64_t numel = task.layout.live_rows() * task.layout.cols;
    parameters.push_back(tensor_over(task.parameter, numel, task.value_dtype));
    grads.push_back(tensor_over(task.grad, numel, task.value_dtype));
    exp_avgs.push_back(tensor_over(task.exp_avg, numel, task.value_dtype));
    exp_avg_sqs.push_back(tensor_over(task.exp_avg_sq, numel, task.value_dtype));
    steps.push_back(scalar_over(task.step));
    all.push_back(task);
    if (task.quantizes == StepQuantizes::kCodes) to_encode.push_back(task);
  }
  at::_fused_adamw_(parameters, grads, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, steps,
                    options.lr, options.beta1, options.beta2, options.weight_decay, options.eps,
                    /*amsgrad=*/false, options.maximize, optional_scalar(options.grad_scale),
                    optional_scalar(options.found_inf));
  compute_amax(all, {});
  quantize(to_encode, {});
}

}  // namespace

StepQuantizes step_quantizes(const Layout& layout) {
  const Format& format = *layout.format;
  // No step writes two images, nor rows of activations.
  if (format.columnwise || format.has_rows_of_their_own()) return StepQuantizes::kSkip;
  // A scale of whole rows or of the matrix spans tiles: no pass over one has seen its amax.
  const bool is_wide = format.has_tensor_scale() || format.scale.is_of_row();
  // Stochastic rounding draws its words when ranks have agreed on their count.
  if (!is_wide && !format.stochastic_rounding && layout.owns_its_blocks()) {
    return StepQuantizes::kCodes;
  }
  const bool keeps_its_scale = is_wide && format.scale.is_in_grid() && format.scale.power_of_two &&
                               !format.stochastic_rounding && format.amax_history.length == 0;
  if (keeps_its_scale) return StepQuantizes::kSpeculative;
  // The amaxes of boundary blocks alone need no pass over the values.
  return format.has_grid() ? StepQuantizes::kAmax : StepQuantizes::kSkip;
}

void fused_adamw(std::span<const AdamWTask> tasks, const AdamWOptions& options, Stream stream) {
  if (tasks.empty()) return;
  if (!stream.is_cuda) return fused_adamw_cpu(tasks, options);
  cuda::fused_adamw(tasks, options, stream.handle);
}

}  // namespace qshard
