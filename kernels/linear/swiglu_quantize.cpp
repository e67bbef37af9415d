#include "kernels/linear/swiglu_quantize.h"

#include <c10/cuda/CUDAStream.h>

#include "kernels/device/check_launch.h"
#include "kernels/format/value_dtype.h"
#include "kernels/linear/packed_activation.h"
#include "kernels/linear/swiglu_task.h"

namespace qshard::cuda {
namespace {

at::Tensor empty_maxima(const SwigluTask& task, at::Device device) {
  return at::empty({swiglu_maxima_numel(task.m, task.k)},
                   at::TensorOptions().dtype(at::kFloat).device(device));
}

at::Tensor maxima_of(const SwigluTask& task, const at::TensorOptions& values, cudaStream_t stream) {
  const at::Tensor maxima = empty_maxima(task, values.device());
  check_launch(launch_swiglu_maxima(task, maxima.mutable_data_ptr<float>(),
                                    value_dtype(c10::typeMetaToScalarType(values.dtype())),
                                    stream));
  return maxima;
}

}  // namespace

QuantizedMatrix quantize_swiglu(const at::Tensor& gate, const at::Tensor& up, Activation activation,
                                const OperandRequest& request, at::Tensor& maxima) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor gate_rows = with_dense_rows(gate);
  const at::Tensor up_rows = with_dense_rows(up);
  const SwigluTask task = swiglu_task(gate_rows, up_rows, activation);
  const DType dtype = value_dtype(gate.scalar_type());
  const QuantizedMatrix out = empty_packed(task.m, task.k, request, gate.device());
  SwigluImage image{activation_task(out)};
  if (const HeldPreviousAmax previous = previous_amax(request, maxima, gate.device());
      previous.amax != nullptr) {
    const at::Tensor own = empty_maxima(task, gate.device());
    check_launch(launch_swiglu_quantize_by_previous(task, image.task, previous,
                                                    own.mutable_data_ptr<float>(), dtype, stream));
    if (!request.delayed) maxima = own;
    return out;
  }
  if (has_one_scale(*request.format)) {
    if (!maxima.defined()) maxima = maxima_of(task, gate.options(), stream);
    image.amax = maxima.const_data_ptr<float>();
  }
  check_launch(launch_swiglu_quantize(task, image, dtype, stream));
  return out;
}

bool can_quantize_swiglu_backward(const at::Tensor& gate, const SwigluBackwardRequest& request) {
  const OperandRequest& gradients = request.gradients;
  const Format& format = *gradients.format;
  if (has_scale_per_row(format)) return false;
  if (request.input != nullptr && has_scale_per_row(*request.input)) return false;
  const auto expected = has_one_scale(format) ? DType::kFloat8E5M2 : DType::kFloat8E4M3;
  return gate.is_cuda() && gradients.operand_layout == OperandLayout::kPacked &&
         !gradients.delayed && gradients.role == OperandRole::kGradient &&
         format.activations.gradient_dtype == expected &&
         (!request.joined || gate.size(1) % kTileColumns == 0);
}

SwigluBackward quantize_swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                        const at::Tensor& up,
                                        const SwigluBackwardRequest& request) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const at::Device device = gate.device();
  const at::Tensor gate_rows = with_dense_rows(gate);
  const at::Tensor up_rows = with_dense_rows(up);
  const at::Tensor grads = grad.contiguous();
  SwigluTask task = swiglu_task(gate_rows, up_rows, request.activation);
  task.grad = grads.const_data_ptr();
  const DType dtype = value_dtype(gate.scalar_type());
  const bool one_scale = has_one_scale(*request.gradients.format);
  SwigluBackward result;
  SwigluGradients out;
  if (request.joined) {
    result.gate = empty_packed(task.m, 2 * task.k, request.gradients, device);
    const ActivationTask whole = activation_task(result.gate);
    out.gate.task = columns_of(whole, 0, task.k, one_scale);
    out.up.task = columns_of(whole, task.k, task.k, one_scale);
  } else {
    result.gate = empty_packed(task.m, task.k, request.gradients, device);
    out.gate.task = activation_task(result.gate);
    if (up.defined()) {
      result.up = empty_packed(task.m, task.k, request.gradients, device);
      out.up.task = activation_task(result.up);
    }
  }
  at::Tensor amaxes;
  at::Tensor maxima = request.maxima;
  if (one_scale) {
    amaxes = no_amax(request.joined ? 1 : 2, device);
    auto* first = amaxes.mutable_data_ptr<float>();
    auto* second = first + (request.joined ? 0 : 1);
    const float* known = maxima.defined() ? maxima.const_data_ptr<float>() : nullptr;
    check_launch(launch_swiglu_backward_amax(task, known, first, second, out.gate.task.power_of_two,
                                             dtype, stream));
    out.gate.amax = first;
    out.up.amax = second;
  }
  if (request.input != nullptr) {
    const OperandRequest columns{.format = request.input, .orientations = {.columnwise = true}};
    if (has_one_scale(*request.input) != one_scale) {
      // The kernel scales all that it makes in one way.
      result.input = quantize_swiglu(gate_rows, up_rows, request.activation, columns, maxima);
    } else {
      result.input = empty_packed(task.m, task.k, columns, device);
      out.input.task = activation_task(result.input);
      if (one_scale && !maxima.defined()) maxima = maxima_of(task, gate.options(), stream);
      if (one_scale) out.input.amax = maxima.const_data_ptr<float>();
    }
  }
  const at::Tensor& sums = request.column_sums;
  const int64_t tiles = ceil_div(task.m, kTileColumns);
  at::Tensor partial;
  if (sums.defined()) {
    partial = at::empty({up.defined() ? 2 : 1, tiles, task.k}, sums.options());
    out.gate.column_sums = partial.mutable_data_ptr<float>();
    if (up.defined()) out.up.column_sums = out.gate.column_sums + tiles * task.k;
  }
  check_launch(launch_swiglu_backward_quantize(task, out, dtype, stream));
  if (!sums.defined()) return result;
  for (int64_t i = 0; i < partial.size(0); ++i) {
    check_launch(launch_swiglu_column_sums(partial[i].const_data_ptr<float>(), tiles, task.k,
                                           sums.mutable_data_ptr<float>() + i * task.k, stream));
  }
  return result;
}

}  // namespace qshard::cuda
