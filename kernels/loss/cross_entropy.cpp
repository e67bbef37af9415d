#include "kernels/loss/cross_entropy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include "kernels/format/value_dtype.h"
#include "kernels/loss/cross_entropy_cpu.h"
#include "kernels/loss/cross_entropy_cuda.h"

namespace qshard {
namespace {

Smoothing smoothing_of(double smoothing, int64_t words) {
  const double of_other = smoothing / static_cast<double>(words);
  return {static_cast<float>(smoothing), static_cast<float>(1. - smoothing),
          static_cast<float>(of_other), static_cast<float>(1. - smoothing + of_other)};
}

CrossEntropyTask task_of(const CrossEntropy& of, const at::Tensor& log_sums) {
  CrossEntropyTask task;
  task.logits = of.logits.const_data_ptr();
  task.targets = of.targets.const_data_ptr<int64_t>();
  task.m = of.logits.size(0);
  task.v = of.logits.size(1);
  task.ignored = of.ignored;
  task.smoothing = smoothing_of(of.label_smoothing, task.v);
  task.log_sums = const_cast<float*>(log_sums.const_data_ptr<float>());
  return task;
}

void check_targets(const CrossEntropyTask& task) {
  for (int64_t row = 0; row < task.m; ++row) {
    const int64_t target = task.targets[row];
    TORCH_CHECK_INDEX(target == task.ignored || (target >= 0 && target < task.v), "qshard: target ",
                      target, " of token ", row, " is none of ", task.v,
                      " words, and not ignore_index=", task.ignored);
  }
}

}  // namespace

CrossEntropyLosses cross_entropy_losses(const CrossEntropy& of) {
  const auto floats = of.logits.options().dtype(at::kFloat);
  const int64_t m = of.logits.size(0);
  CrossEntropyLosses made{at::empty({m}, floats), at::empty({2}, floats), at::empty({m}, floats)};
  CrossEntropyTask task = task_of(of, made.log_sums);
  task.losses = made.losses.mutable_data_ptr<float>();
  task.totals = made.totals.mutable_data_ptr<float>();
  if (of.logits.is_cuda()) {
    cuda::cross_entropy_losses(task, of.logits.scalar_type());
    return made;
  }
  check_targets(task);
  cpu::cross_entropy_losses(task, value_dtype(of.logits.scalar_type()));
  return made;
}

at::Tensor cross_entropy_gradient(const CrossEntropy& of, const at::Tensor& log_sums) {
  at::Tensor out = at::empty_like(of.logits);
  const CrossEntropyTask task = task_of(of, log_sums);
  if (of.logits.is_cuda()) {
    cuda::cross_entropy_gradient(task, out);
  } else {
    cpu::cross_entropy_gradient(task, value_dtype(out.scalar_type()), out.mutable_data_ptr());
  }
  return out;
}

QuantizedMatrix cross_entropy_codes(const CrossEntropy& of, const at::Tensor& log_sums,
                                    const OperandRequest& request) {
  TORCH_CHECK(!has_scale_per_row(*request.format),
              "qshard: the gradient of logits has no codes with a scale per row");
  if (of.logits.is_cuda()) {
    return cuda::cross_entropy_codes(task_of(of, log_sums), request, of.logits.options());
  }
  const at::Tensor largest = at::ones({1}, log_sums.options());
  return PlainOperand(cross_entropy_gradient(of, log_sums), largest).codes(request);
}

}  // namespace qshard
