// linear on plain and quantized tensors, below autograd.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "dispatch/kernel_bridge.h"
#include "dispatch/matmul.h"
#include "dispatch/quantized_tensor_impl.h"
#include "kernels/block_scaled_operand.h"
#include "kernels/linear.h"
#include "ops/dynamic_weight.h"
#include "ops/ops.h"
#include "ops/recorded_activation.h"

namespace qshard {
namespace {

thread_local const SharedInput* t_shared_input = nullptr;

// A mode may hand the operator another tensor than it was called with.
const SharedInput& shared_as(const Tensor& input) {
  static const SharedInput not_shared;
  const bool is_shared = t_shared_input != nullptr && t_shared_input->tensor.is_same(input);
  return is_shared ? *t_shared_input : not_shared;
}

Tensor as_matrix(const Tensor& tensor) {
  return tensor.reshape({leading_numel(tensor), tensor.size(-1)});
}

void check_linear_shapes(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(
      input.dim() >= 1 && input.size(-1) == weight.size(1),
      fmt::format("qshard::linear: input of shape {} does not fit a weight of shape {}; the "
                  "last input dimension must be {}",
                  input.sizes().vec(), weight.sizes().vec(), weight.size(1)));
  TORCH_CHECK(
      !bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)),
      fmt::format("qshard::linear: bias of shape {} does not fit a weight of shape {}",
                  bias ? bias->sizes().vec() : std::vector<int64_t>{}, weight.sizes().vec()));
  TORCH_CHECK(
      is_value_dtype(input.scalar_type()),
      fmt::format("qshard::linear: input dtype {} is not supported; use float32, bfloat16 or "
                  "float16",
                  c10::toString(input.scalar_type())));
  TORCH_CHECK(input.device() == weight.device(),
              fmt::format("qshard::linear: input is on {} but the weight is on {}",
                          input.device().str(), weight.device().str()));
}

/// A module knows its weight's format from quantize_; the weight may have been replaced since.
void check_expected_format(const WeightOperand& weight, std::optional<c10::string_view> format) {
  if (!format) return;
  const Format* actual = weight.layout.format;
  TORCH_CHECK(
      &find_format({format->data(), format->size()}) == actual,
      fmt::format(
          "qshard::linear: the input was quantized for a {} weight, and the weight is {}; a "
          "compiled module whose weight was replaced needs qshard.quantize_(module, recipe) "
          "for the new format",
          std::string(*format), actual->name));
}

/// A quantized weight, or a plain one that is quantized for this use.
WeightOperand operand_of(const Tensor& weight, std::optional<c10::string_view> format,
                         WeightState state, WeightUse use, const char* op) {
  if (!state || has_key(weight)) return weight_operand(weight, op);
  TORCH_CHECK_VALUE(format,
                    fmt::format("{}: weight_state is given, so format must name the weight's", op));
  return quantize_for_use(weight, find_format({format->data(), format->size()}), *state, use, op);
}

WeightUse backward_use(bool needs_input) {
  return needs_input ? WeightUse::kDgrad : WeightUse::kWgradOnly;
}

// linear_backward of inputs and gradients of any dimensions; grad_input (0,) if not needed.
LinearBackward backward_of(const Tensor& grad, const WeightOperand& operand, const Tensor& input,
                           bool input_is_quantized, bool needs_input, bool needs_weight,
                           at::ScalarType weight_grad_dtype, bool weight_only, const Tensor& sum) {
  c10::OptionalDeviceGuard device_guard(grad.device());
  const Tensor input_matrix = input_is_quantized || !needs_weight ? input : as_matrix(input);
  auto result = linear_backward(as_matrix(grad), operand, input_matrix, input_is_quantized,
                                needs_input, needs_weight, weight_grad_dtype, weight_only, sum);
  if (needs_input) {
    auto sizes = grad.sizes().vec();
    sizes.back() = operand.layout.cols;
    if (grad.dim() != 2) result.grad_input = at::_unsafe_view(result.grad_input, sizes);
  } else {
    result.grad_input = at::empty({0}, grad.options());
  }
  return result;
}

}  // namespace

ShareInputCodes::ShareInputCodes(const Tensor& input) : previous_(t_shared_input) {
  input_.record = record_of_activation(input);
  if (input_.record) input_.tensor = input;
  t_shared_input = &input_;
}
ShareInputCodes::~ShareInputCodes() { t_shared_input = previous_; }

bool shares_input_codes(const Tensor& input) {
  return static_cast<bool>(record_of_activation(input));
}

std::tuple<Tensor, Tensor> linear_forward_op(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias, bool save_quantized_input,
                                             bool weight_only, const OptionalTensor& input_rows,
                                             std::optional<c10::string_view> format,
                                             WeightState weight_state) {
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(weight.device());
  const auto operand =
      operand_of(weight, format, weight_state, WeightUse::kForward, "qshard::linear");
  check_expected_format(operand, format);
  check_linear_shapes(input, weight, bias);
  auto result = linear_forward(as_matrix(has_key(input) ? value_of(input) : input), operand, bias,
                               save_quantized_input, weight_only, shared_as(input),
                               input_rows.value_or(Tensor()));
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  // Detached from the 2-D result, so that N-D outputs are no views (FSDP2 warns about those).
  if (input.dim() != 2) result.output = at::_unsafe_view(result.output, sizes);
  return {result.output, result.saved};
}

std::tuple<Tensor, Tensor> linear_backward_op(const Tensor& grad, const Tensor& weight,
                                              const Tensor& input, bool input_is_quantized,
                                              bool needs_input, bool needs_weight, bool weight_only,
                                              std::optional<at::ScalarType> grad_dtype,
                                              std::optional<c10::string_view> format,
                                              WeightState weight_state) {
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(weight.device());
  const auto dtype = grad_dtype.value_or(weight.scalar_type());
  TORCH_CHECK(is_value_dtype(dtype),
              fmt::format("qshard::linear_backward: grad_dtype {} is not supported; use float32, "
                          "bfloat16 or float16",
                          c10::toString(dtype)));
  const auto operand = operand_of(weight, format, weight_state, backward_use(needs_input),
                                  "qshard::linear_backward");
  auto result = backward_of(grad, operand, input, input_is_quantized, needs_input, needs_weight,
                            dtype, weight_only, /*sum=*/{});
  if (!needs_weight) result.grad_weight = at::empty({0}, grad.options().dtype(dtype));
  return {result.grad_input, result.grad_weight};
}

Tensor linear_backward_accumulate_op(const Tensor& grad, const Tensor& weight, const Tensor& input,
                                     bool input_is_quantized, bool needs_input,
                                     const Tensor& weight_grad, bool weight_only,
                                     std::optional<c10::string_view> format,
                                     WeightState weight_state) {
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(weight.device());
  TORCH_CHECK(
      !has_key(weight_grad) && is_value_dtype(weight_grad.scalar_type()),
      fmt::format("qshard::linear_backward_accumulate: weight_grad must be a plain float32, "
                  "bfloat16 or float16 tensor, got {}",
                  c10::toString(weight_grad.scalar_type())));
  const auto operand = operand_of(weight, format, weight_state, backward_use(needs_input),
                                  "qshard::linear_backward_accumulate");
  bump_version(weight_grad);
  return backward_of(grad, operand, input, input_is_quantized, needs_input, /*needs_weight=*/true,
                     weight_grad.scalar_type(), weight_only, weight_grad)
      .grad_input;
}

Tensor transposed_operand(const Tensor& x, bool hadamard) {
  PlainGuard guard;
  TORCH_CHECK(x.dim() == 2 && !has_key(x) && is_value_dtype(x.scalar_type()),
              fmt::format("qshard::_transposed_operand: needs a plain float32, bfloat16 or float16 "
                          "matrix, got {} of shape {}",
                          c10::toString(x.scalar_type()), x.sizes().vec()));
  c10::OptionalDeviceGuard device_guard(x.device());
  return transposed_values(x, hadamard);
}

std::tuple<Tensor, Tensor> quantize_input_op(const Tensor& input, c10::string_view format,
                                             bool rows, bool columns) {
  PlainGuard guard;
  const Format& found = find_format({format.data(), format.size()});
  auto codes =
      quantize_input(as_matrix(has_key(input) ? value_of(input) : input), found, rows, columns);
  return {codes.rows, codes.columns};
}

bool is_quantized_on_use(const Tensor& weight, std::optional<c10::string_view> format) {
  if (!format || has_key(weight) || weight.is_meta()) return false;
  // Of what is traced, or a subclass, only its own kernels know what it is.
  if (weight.key_set().has_any(c10::python_ks) ||
      weight.key_set().has(c10::DispatchKey::Functionalize)) {
    return false;
  }
  if (weight.is_leaf() && weight.requires_grad()) {
    TORCH_WARN_ONCE(fmt::format(
        "qshard::linear: the weight of a quantized module is a plain parameter, which is quantized "
        "to {} at each use and gathered in full by FSDP2. Where it was assigned to stay, call "
        "qshard.quantize_(model, recipe) again",
        std::string(*format)));
  }
  return true;
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              bool weight_only, std::optional<c10::string_view> format, WeightState weight_state) {
  const bool is_dynamic = weight_state.has_value();
  const Tensor quantized = !is_dynamic && is_quantized_on_use(weight, format)
                               ? quantize(weight, *format, false, std::nullopt, 0)
                               : weight;
  return std::get<0>(linear_forward_op(input, quantized, bias, /*save_quantized_input=*/false,
                                       weight_only, std::nullopt,
                                       is_dynamic ? format : std::nullopt, weight_state));
}

Tensor aten_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  PlainGuard guard;
  const auto plain = [](const Tensor& tensor) {
    return has_key(tensor) ? value_of(tensor) : tensor;
  };
  const auto plain_bias = bias && bias->defined() ? OptionalTensor(plain(*bias)) : std::nullopt;
  if (!has_key(weight)) return at::linear(plain(input), weight, plain_bias);
  return linear(plain(input), weight, plain_bias, /*weight_only=*/false, std::nullopt,
                std::nullopt);
}

}  // namespace qshard
