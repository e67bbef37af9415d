// _fused_adamw_: the step of torch.optim.AdamW(fused=True) that quantizes what it writes.
//
// Parameters that this serves go to one kernel (kernels/adamw/adamw.h), the rest of the list to
// torch's own, on their values, as the fallback does it. Both have the same bits.
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "dispatch/aten/fallback.h"
#include "dispatch/aten/native_kernels.h"
#include "dispatch/flush/requantize.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/parts/storage.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "dispatch/tensor/write_scope.h"
#include "kernels/adamw/adamw.h"

namespace qshard {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

/// The arguments of _fused_adamw_ but for lr.
struct AdamWArguments {
  at::TensorList parameters, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
  double beta1, beta2, weight_decay, eps;
  bool amsgrad, maximize;
  const OptionalTensor& grad_scale;
  const OptionalTensor& found_inf;

  bool has_equal_lists() const {
    const size_t size = parameters.size();
    return grads.size() == size && exp_avgs.size() == size && exp_avg_sqs.size() == size &&
           steps.size() == size;
  }
};

/// Whether a kernel may read or write the numbers of `tensor` at its data pointer.
bool is_plain(const at::Tensor& tensor, at::ScalarType dtype, at::Device device) {
  return tensor.defined() && !has_key(tensor) && tensor.has_storage() &&
         tensor.layout() == at::kStrided && tensor.scalar_type() == dtype &&
         tensor.device() == device && !tensor.is_neg();
}

bool is_plain_scalar(const at::Tensor& tensor, at::Device device) {
  return is_plain(tensor, at::kFloat, device) && tensor.numel() == 1;
}

bool is_plain_scalar(const OptionalTensor& tensor, at::Device device) {
  return !tensor || !tensor->defined() || is_plain_scalar(*tensor, device);
}

/// Whether the arguments that all parameters share are as torch's kernels take them.
bool serves(const AdamWArguments& a, const at::IValue& lr) {
  if (a.amsgrad || a.parameters.empty() || !a.has_equal_lists()) return false;
  const at::Device device = a.parameters[0].device();
  if (lr.isTensor() && !is_plain_scalar(lr.toTensor(), device) &&
      !is_plain_scalar(lr.toTensor(), at::kCPU)) {
    return false;
  }
  const auto dtype = a.parameters[0].scalar_type();
  const bool are_alike =
      std::all_of(a.parameters.begin(), a.parameters.end(), [&](const at::Tensor& parameter) {
        return parameter.device() == device && parameter.scalar_type() == dtype;
      });
  return are_alike && !device.is_meta() && is_plain_scalar(a.grad_scale, device) &&
         is_plain_scalar(a.found_inf, device);
}

/// Whether a quantized parameter's value is a master that begins with the rows that it shows, all
/// of its live ones, and its place among the ranks is known.
bool has_steppable_master(const at::Tensor& parameter) {
  if (!is_quantized(parameter)) return false;
  const QuantizedBuffer& buffer = buffer_of(parameter);
  const Layout& layout = buffer.layout();
  if (!buffer.planes().master().defined()) return false;
  if (parameter.numel() == 0) return true;
  const Placement& placement = buffer.placement();
  if (!placement.group() && !layout.holds_all_rows()) return false;
  if (!is_one_range(layout)) return false;  // its kernels find blocks in one range of rows
  const auto rows = row_window(parameter);
  return rows && rows->first == 0 && rows->count == layout.live_rows() &&
         step_quantizes(layout) != StepQuantizes::kSkip;
}

bool serves(const AdamWArguments& a, size_t i) {
  const at::Tensor& parameter = a.parameters[i];
  if (!has_steppable_master(parameter)) return false;
  const at::Device device = parameter.device();
  const auto is_alike = [&](const at::Tensor& tensor) {
    return is_plain(tensor, parameter.scalar_type(), device) && tensor.is_contiguous() &&
           tensor.sizes() == parameter.sizes();
  };
  return is_alike(a.grads[i]) && is_alike(a.exp_avgs[i]) && is_alike(a.exp_avg_sqs[i]) &&
         is_plain_scalar(a.steps[i], device);
}

/// torch's own step of the parameters with these indices.
void run_stock(const char* overload, const AdamWArguments& a, const at::IValue& lr,
               const std::vector<size_t>& indices) {
  const auto some_of = [&](at::TensorList list) {
    if (list.size() != a.parameters.size()) return list.vec();
    std::vector<at::Tensor> some;
    for (const size_t i : indices) some.push_back(list[i]);
    return some;
  };
  torch::jit::Stack stack;
  torch::jit::push(stack, some_of(a.parameters), some_of(a.grads), some_of(a.exp_avgs),
                   some_of(a.exp_avg_sqs), some_of(a.max_exp_avg_sqs), some_of(a.steps), lr,
                   a.beta1, a.beta2, a.weight_decay, a.eps, a.amsgrad, a.maximize, a.grad_scale,
                   a.found_inf);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_fused_adamw_", overload);
  fallback(op, {}, &stack);
}

AdamWOptions options_of(const AdamWArguments& a, const at::IValue& lr, at::Device device) {
  const auto pointer = [](const OptionalTensor& tensor) {
    return tensor && tensor->defined() ? tensor->const_data_ptr<float>() : nullptr;
  };
  AdamWOptions options;
  if (!lr.isTensor()) {
    options.lr = lr.toDouble();
  } else if (device.is_cuda() && lr.toTensor().is_cuda()) {
    options.device_lr = lr.toTensor().const_data_ptr<float>();
  } else {
    options.lr = lr.toTensor().item<double>();
  }
  options.beta1 = a.beta1;
  options.beta2 = a.beta2;
  options.weight_decay = a.weight_decay;
  options.eps = a.eps;
  options.maximize = a.maximize;
  options.grad_scale = pointer(a.grad_scale);
  options.found_inf = pointer(a.found_inf);
  return options;
}

int64_t speculative_numel(const AdamWTask& task) {
  return task.quantizes == StepQuantizes::kSpeculative ? task.layout.grid_numel() : 0;
}

/// Steps and quantizes the parameters with these indices; all of them are served.
void run_fused(const AdamWArguments& a, const at::IValue& lr, const std::vector<size_t>& indices) {
  const at::Device device = a.parameters[0].device();
  c10::OptionalDeviceGuard device_guard(device);
  std::vector<AdamWTask> tasks;
  std::vector<QuantizedBuffer*> buffers;  // of the tasks
  tasks.reserve(indices.size());
  int64_t words = 0;
  for (const size_t i : indices) {
    const at::Tensor& parameter = a.parameters[i];
    QuantizedBuffer& buffer = buffer_of(parameter);
    if (parameter.numel() == 0) continue;
    const WritableCodes codes = buffer.write_codes();
    AdamWTask& task = tasks.emplace_back();
    task.layout = buffer.layout();
    task.boundary = find_boundary_blocks(task.layout, ranks_of(buffer.placement().group()));
    task.value_dtype = value_dtype(buffer.dtype());
    task.parameter = WriteScope(parameter).data();
    task.values = task.parameter;
    task.image = codes.image;
    task.grid = codes.grid;
    task.quantizes = step_quantizes(task.layout);
    task.grad = a.grads[i].mutable_data_ptr();
    task.exp_avg = a.exp_avgs[i].mutable_data_ptr();
    task.exp_avg_sq = a.exp_avg_sqs[i].mutable_data_ptr();
    task.step = a.steps[i].const_data_ptr<float>();
    buffers.push_back(&buffer);
    words += amax_numel(task.layout, task.boundary) + speculative_numel(task);
  }
  const auto left = at::zeros({words}, at::TensorOptions().dtype(at::kFloat).device(device));
  float* next = left.mutable_data_ptr<float>();
  for (AdamWTask& task : tasks) {
    task.amax = next;
    next += amax_numel(task.layout, task.boundary);
    if (speculative_numel(task) > 0) task.speculative_scale_inv = next;
    next += speculative_numel(task);
  }
  fused_adamw(tasks, options_of(a, lr, device), current_stream(device));

  for (const size_t i : indices) {
    // What holds no rows was written, too: ranks must agree on who flushes.
    a.parameters[i].numel() == 0 ? bump_and_mark_written(a.parameters[i])
                                 : bump_version(a.parameters[i]);
  }
  // After the bumps: they are this write's.
  const auto left_at = [&](const float* first, int64_t count) {
    const int64_t offset = first - left.const_data_ptr<float>();
    return tensor_at(left.storage(), at::kFloat, offset * static_cast<int64_t>(sizeof(float)),
                     {count});
  };
  for (size_t t = 0; t < tasks.size(); ++t) {
    const AdamWTask& task = tasks[t];
    at::Tensor speculative_scale_inv;
    if (task.speculative_scale_inv)
      speculative_scale_inv = left_at(task.speculative_scale_inv, speculative_numel(task));
    buffers[t]->flush_state().write_with_amax(
        device, left_at(task.amax, amax_numel(task.layout, task.boundary)),
        std::move(speculative_scale_inv), task.quantizes == StepQuantizes::kCodes);
  }
}

void step(const char* overload, const AdamWArguments& a, const at::IValue& lr) {
  PlainGuard guard;
  std::vector<size_t> served, others;
  const bool serves_any = serves(a, lr);
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    (serves_any && serves(a, i) ? served : others).push_back(i);
  }
  // First what checks its arguments.
  if (!others.empty() || served.empty()) run_stock(overload, a, lr, others);
  if (!served.empty()) run_fused(a, lr, served);
}

void fused_adamw_(at::TensorList self, at::TensorList grads, at::TensorList exp_avgs,
                  at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                  at::TensorList state_steps, double lr, double beta1, double beta2,
                  double weight_decay, double eps, bool amsgrad, bool maximize,
                  const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  step("",
       {self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, beta1, beta2,
        weight_decay, eps, amsgrad, maximize, grad_scale, found_inf},
       lr);
}

void fused_adamw_tensor_lr_(at::TensorList self, at::TensorList grads, at::TensorList exp_avgs,
                            at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                            at::TensorList state_steps, const at::Tensor& lr, double beta1,
                            double beta2, double weight_decay, double eps, bool amsgrad,
                            bool maximize, const OptionalTensor& grad_scale,
                            const OptionalTensor& found_inf) {
  step("tensor_lr",
       {self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, beta1, beta2,
        weight_decay, eps, amsgrad, maximize, grad_scale, found_inf},
       lr);
}

}  // namespace

void register_optimizers(torch::Library& aten) {
  aten.impl("_fused_adamw_", &fused_adamw_);
  aten.impl("_fused_adamw_.tensor_lr", &fused_adamw_tensor_lr_);
}

}  // namespace qshard
