// linear of nested tensors, strided and jagged. torch's own linear takes them, and asks its
// backends (dispatch/nested.cpp): ours reads codes there. A jagged tensor runs on its values, as
// the operator would.
#include <fmt/format.h>

#include <torch/library.h>

#include "dispatch/quantized_tensor_impl.h"
#include "ops/autograd.h"
#include "ops/dynamic_weight.h"

namespace qshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// A plain weight by its state, straight through in backward.
struct QuantizeForUses : Function<QuantizeForUses> {
  static Tensor forward(AutogradContext*, const Tensor& weight, c10::string_view format,
                        const std::vector<Tensor>& state) {
    at::AutoDispatchBelowAutograd guard;
    static const auto op = typed_op<decltype(quantize_for_uses)>("qshard::_quantize_for_uses");
    return op.call(weight, format, state);
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], {}, {}};
  }
};

Tensor used_weight(const Tensor& weight, std::optional<c10::string_view> format, WeightState state,
                   bool weight_only, at::ScalarType dtype) {
  Tensor used = weight;
  if (state) {
    TORCH_CHECK_VALUE(format,
                      "qshard::linear: weight_state is given, so format must name the weight's");
    used = QuantizeForUses::apply(weight, *format, *state);
  } else if (is_quantized_on_use(weight, format)) {
    used = quantize_autograd(weight, *format, false, std::nullopt, 0);
  }
  return weight_only ? dequantize_autograd(used, dtype) : used;
}

Tensor linear_nested(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     bool weight_only, std::optional<c10::string_view> format,
                     WeightState weight_state, const OptionalTensor& residual, bool) {
  TORCH_CHECK_TYPE(input.is_nested() && !weight.is_nested(),
                   fmt::format("qshard::linear: the weight must be a strided tensor, and nested is "
                               "what the input alone may be; got an input that is {} and a weight "
                               "that is {}",
                               describe(input), describe(weight)));
  const Tensor used = used_weight(weight, format, weight_state, weight_only, input.scalar_type());
  const Tensor output = at::linear(input, used, bias);
  return residual && residual->defined() ? *residual + output : output;
}

}  // namespace

// Without autograd, as in inference_mode, the key is the backend's: that of a plain weight, too.
TORCH_LIBRARY_IMPL(qshard, AutogradNestedTensor, m) { m.impl("linear", &linear_nested); }
TORCH_LIBRARY_IMPL(qshard, NestedTensorCPU, m) { m.impl("linear", &linear_nested); }
TORCH_LIBRARY_IMPL(qshard, NestedTensorCUDA, m) { m.impl("linear", &linear_nested); }
TORCH_LIBRARY_IMPL(qshard, NestedTensorPrivateUse3, m) { m.impl("linear", &linear_nested); }

}  // namespace qshard
