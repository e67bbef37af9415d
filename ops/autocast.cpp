// autocast of the public operators: what torch does for aten::linear. Activations, biases and
// residuals are cast to autocast's dtype, which the output then has, eager or compiled. Quantized
// weights have no dtype to cast, and plain ones are quantized from what they are.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/calls/ops.h"
#include "ops/linear/grouped_linear.h"
#include "ops/linear/norm_linear.h"
#include "ops/loss/linear_cross_entropy.h"
#include "ops/mlp/swiglu_mlp.h"

namespace qshard {
namespace {

using c10::DeviceType;

/// Off below this, as in torch's own autocast kernels.
template <DeviceType kDevice>
class Autocast {
 public:
  Tensor operator()(const Tensor& tensor) const {
    return at::autocast::cached_cast(dtype_, tensor, kDevice);
  }
  OptionalTensor operator()(const OptionalTensor& tensor) const {
    return tensor && tensor->defined() ? OptionalTensor((*this)(*tensor)) : std::nullopt;
  }
  std::optional<std::vector<Tensor>> operator()(
      const std::optional<std::vector<Tensor>>& tensors) const {
    if (!tensors) return std::nullopt;
    std::vector<Tensor> cast;
    for (const Tensor& tensor : *tensors) cast.push_back((*this)(tensor));
    return cast;
  }

 private:
  at::ScalarType dtype_ = at::autocast::get_autocast_dtype(kDevice);
  c10::impl::ExcludeDispatchKeyGuard off_{
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice)};
};

template <typename Signature>
auto typed_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

template <DeviceType kDevice>
Tensor linear_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       bool weight_only, std::optional<c10::string_view> format,
                       const WeightState& weight_state, const OptionalTensor& residual,
                       bool input_is_kept) {
  static const auto op = typed_op<decltype(linear)>("qshard::linear");
  const Autocast<kDevice> cast;
  return op.call(cast(input), weight, cast(bias), weight_only, format, weight_state, cast(residual),
                 input_is_kept);
}

template <DeviceType kDevice>
Tensor grouped_linear_autocast(const Tensor& input, const Tensor& weight, const Tensor& offs,
                               bool weight_only, std::optional<c10::string_view> format) {
  static const auto op = typed_op<decltype(grouped_linear)>("qshard::grouped_linear");
  return op.call(Autocast<kDevice>()(input), weight, offs, weight_only, format);
}

/// The normalization computes in fp32 whatever the dtypes are, and rounds once, to the input's.
template <DeviceType kDevice>
std::vector<Tensor> norm_linear_autocast(const Tensor& input, const Tensor& norm_weight,
                                         const OptionalTensor& norm_bias, at::TensorList weights,
                                         const std::optional<std::vector<Tensor>>& biases,
                                         double eps, bool rms, bool zero_centered_gamma,
                                         std::optional<c10::string_view> format, bool with_input) {
  static const auto op = typed_op<decltype(norm_linear)>("qshard::norm_linear");
  const Autocast<kDevice> cast;
  return op.call(cast(input), norm_weight, norm_bias, weights, cast(biases), eps, rms,
                 zero_centered_gamma, format, with_input);
}

template <DeviceType kDevice>
Tensor swiglu_mlp_autocast(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const Tensor& down, const OptionalTensor& gate_bias,
                           const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                           bool weight_only, c10::string_view format, c10::string_view down_format,
                           const WeightState& gate_state, const WeightState& up_state,
                           const WeightState& down_state, const OptionalTensor& residual,
                           const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                           double eps, bool rms, bool zero_centered_gamma,
                           c10::string_view activation) {
  static const auto op = typed_op<decltype(swiglu_mlp)>("qshard::swiglu_mlp");
  const Autocast<kDevice> cast;
  const bool adds_input = residual && residual->is_same(input);  // which costs no pass in backward
  const Tensor x = cast(input);
  return op.call(x, gate, up, down, cast(gate_bias), cast(up_bias), cast(down_bias), weight_only,
                 format, down_format, gate_state, up_state, down_state,
                 adds_input ? OptionalTensor(x) : cast(residual), norm_weight, norm_bias, eps, rms,
                 zero_centered_gamma, activation);
}

/// The loss is float32, whatever the logits are.
template <DeviceType kDevice>
Tensor linear_cross_entropy_autocast(const Tensor& input, const Tensor& weight,
                                     const Tensor& target, const OptionalTensor& bias,
                                     c10::string_view reduction, int64_t ignore_index,
                                     double label_smoothing, OptionalFormat format,
                                     const WeightState& weight_state,
                                     OptionalFormat forward_precision) {
  static const auto op = typed_op<decltype(linear_cross_entropy)>("qshard::linear_cross_entropy");
  const Autocast<kDevice> cast;
  return op.call(cast(input), weight, target, cast(bias), reduction, ignore_index, label_smoothing,
                 format, weight_state, forward_precision);
}

template <DeviceType kDevice>
Tensor swiglu_experts_autocast(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                               const Tensor& down, const Tensor& offs, bool weight_only,
                               OptionalFormat format, OptionalFormat down_format) {
  static const auto op = typed_op<decltype(swiglu_experts)>("qshard::swiglu_experts");
  return op.call(Autocast<kDevice>()(input), gate, up, down, offs, weight_only, format,
                 down_format);
}

template <DeviceType kDevice>
void register_autocast(torch::Library& m) {
  m.impl("linear", &linear_autocast<kDevice>);
  m.impl("grouped_linear", &grouped_linear_autocast<kDevice>);
  m.impl("norm_linear", &norm_linear_autocast<kDevice>);
  m.impl("swiglu_mlp", &swiglu_mlp_autocast<kDevice>);
  m.impl("linear_cross_entropy", &linear_cross_entropy_autocast<kDevice>);
  m.impl("swiglu_experts", &swiglu_experts_autocast<kDevice>);
}

}  // namespace

TORCH_LIBRARY_IMPL(qshard, AutocastCPU, m) { register_autocast<c10::kCPU>(m); }
TORCH_LIBRARY_IMPL(qshard, AutocastCUDA, m) { register_autocast<c10::kCUDA>(m); }

}  // namespace qshard
