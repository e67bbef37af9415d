#include "kernels/linear/linear_amax.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "kernels/device/current_stream.h"
#include "kernels/format/value_dtype.h"
#include "kernels/format/whole_layout.h"
#include "kernels/quantize/quantize.h"

namespace qshard {
namespace {

DelayedAmax delayed_row(const LinearWeight& weight, int64_t row) {
  if (!weight.amax_history.defined()) return {};
  const AmaxHistory& options = weight.codes.format->amax_history;
  const at::Device device = weight.codes.row_image().image.device();
  TORCH_CHECK(weight.amax_history.device() == device, "qshard: the amax history of a weight on ",
              device, " is on ", weight.amax_history.device());
  return {weight.amax_history.mutable_data_ptr<float>() + row * options.length,
          weight.scaling_amax.const_data_ptr<float>() + row * kScalingAmaxes, options.margin};
}

}  // namespace

DelayedAmax delayed_input_amax(const LinearWeight& weight) {
  return delayed_row(weight, input_row(weight.codes.row_image().layout));
}

DelayedAmax delayed_gradient_amax(const LinearWeight& weight) {
  return delayed_row(weight, gradient_row(weight.codes.row_image().layout));
}

at::Tensor activation_amax(const at::Tensor& x) {
  const at::Tensor values = x.contiguous();
  const at::Tensor amax = at::empty({1}, values.options().dtype(at::kFloat));
  QuantizeTask task;
  task.layout = whole_layout(find_format("float8_tensorwise"), x.size(0), x.size(1));
  task.value_dtype = value_dtype(values.scalar_type());
  task.values = values.const_data_ptr();
  task.amax = amax.mutable_data_ptr<float>();
  compute_amax({&task, 1}, current_stream(x.device()));
  return amax;
}

void collect_amax(const at::Tensor& x, const DelayedAmax& delayed) {
  if (!delayed || !is_value_dtype(x.scalar_type())) return;
  const at::Tensor amax = activation_amax(x);
  delay_amax(amax.mutable_data_ptr<float>(), delayed, current_stream(x.device()));
}

}  // namespace qshard
