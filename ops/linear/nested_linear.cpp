// linear of nested tensors, strided and jagged: their parts lie one after the other, and are the
// rows of one plain input. What does not lie so goes to torch's own linear, which refuses it, or
// asks its backends (dispatch/aten/nested.cpp).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <torch/library.h>

#include "dispatch/aten/matmul.h"
#include "dispatch/aten/registration.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/whole_layout.h"
#include "ops/linear/autograd.h"
#include "ops/linear/dynamic_weight.h"

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

Tensor used_weight(const Tensor& weight, std::optional<c10::string_view> format,
                   const WeightState& state, bool weight_only, at::ScalarType dtype) {
  Tensor used = weight;
  if (state) {
    TORCH_CHECK_VALUE(format,
                      "qshard::linear: weight_state is given, so format must name the weight's");
    const Format& own = checked_format(*format, "qshard::linear");
    TORCH_CHECK_VALUE(
        weight.dim() != 2 || whole_layout(own, weight.size(0), weight.size(1)).fits(),
        fmt::format("qshard::linear: {} needs whole blocks of rows, got a weight of shape {}",
                    own.name, weight.sizes().vec()));
    used = QuantizeForUses::apply(weight, *format, *state);
  } else {
    used = quantized_on_use_autograd(weight, format);
  }
  return weight_only ? dequantize_autograd(used, dtype) : used;
}

/// The sizes of a strided nested tensor whose parts are rows of `cols` elements, one after the
/// other; none of another one. An int64 CPU tensor: parts x dimensions.
std::optional<Tensor> sizes_of_rows(const Tensor& nested, int64_t cols) {
  const Tensor sizes = nested._nested_tensor_size();
  const bool has_rows = sizes.dim() == 2 && sizes.size(1) >= 2;
  if (!has_rows || !nested.is_contiguous() || !sizes.select(1, -1).eq(cols).all().item<bool>()) {
    return std::nullopt;
  }
  return sizes;
}

/// `rows` (total, cols) as parts of these sizes, but for the last.
Tensor nested_from_rows(const Tensor& rows, const Tensor& like_sizes) {
  Tensor sizes = like_sizes.clone();
  sizes.select(1, -1).fill_(rows.size(1));
  Tensor strides = at::ones_like(sizes);
  for (int64_t dim = sizes.size(1) - 2; dim >= 0; --dim) {
    strides.select(1, dim).copy_(strides.select(1, dim + 1) * sizes.select(1, dim + 1));
  }
  const Tensor numel = sizes.prod(1);
  return at::_nested_view_from_buffer(rows.reshape({-1}), sizes, strides, numel.cumsum(0) - numel);
}

/// at::values and the views back have derivatives of their own.
template <typename Linear>
std::optional<Tensor> by_rows(const Tensor& input, int64_t cols, const Linear& linear) {
  if (input.layout() == at::kJagged) {
    // torch's linear, too, refuses a jagged tensor with holes, or with ragged last dimensions.
    const int64_t ragged = at::_nested_get_ragged_idx(input);
    if (ragged == input.dim() - 1 || at::_nested_get_lengths(input).defined()) return std::nullopt;
    return at::_nested_view_from_jagged(
        linear(at::_nested_get_values(input)), at::_nested_get_offsets(input),
        at::_nested_get_jagged_dummy(input), std::nullopt, ragged,
        at::_nested_get_min_seqlen(input), at::_nested_get_max_seqlen(input));
  }
  const auto sizes = sizes_of_rows(input, cols);
  if (!sizes) return std::nullopt;
  return nested_from_rows(linear(input.values().reshape({-1, cols})), *sizes);
}

Tensor linear_nested(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     bool weight_only, std::optional<c10::string_view> format,
                     const WeightState& weight_state, const OptionalTensor& residual,
                     bool input_is_kept) {
  TORCH_CHECK_TYPE(input.is_nested() && !weight.is_nested(),
                   fmt::format("qshard::linear: the weight must be a strided tensor, and nested is "
                               "what the input alone may be; got an input that is {} and a weight "
                               "that is {}",
                               describe(input), describe(weight)));
  const auto of_rows = [&](const Tensor& rows) {
    static const auto op = typed_op<decltype(linear)>("qshard::linear");
    return op.call(rows, weight, bias, weight_only, format, weight_state, std::nullopt,
                   input_is_kept);
  };
  auto output = weight.dim() == 2 ? by_rows(input, weight.size(1), of_rows) : std::nullopt;
  if (!output) {
    output = at::linear(
        input, used_weight(weight, format, weight_state, weight_only, input.scalar_type()), bias);
  }
  return residual && residual->defined() ? *residual + *output : *output;
}

/// F.linear, below autograd: torch's own formula makes its backward, on the codes' values.
Tensor aten_linear_nested(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const auto of_rows = [&](const Tensor& rows) { return at::linear(rows, weight, bias); };
  const bool is_matrix = input.is_nested() && has_key(weight) && weight.dim() == 2;
  auto output = is_matrix ? by_rows(input, weight.size(1), of_rows) : std::nullopt;
  if (output) return *std::move(output);
  const auto plain = [](const Tensor& x) { return dequantized_codes(x, "aten::linear"); };
  return at::linear(plain(input), plain(weight), bias ? OptionalTensor(plain(*bias)) : bias);
}

}  // namespace

// Without autograd, as in inference_mode, the key is the backend's: that of a plain weight, too.
TORCH_LIBRARY_IMPL(qshard, AutogradNestedTensor, m) { m.impl("linear", &linear_nested); }
TORCH_LIBRARY_IMPL(qshard, NestedTensorCPU, m) { m.impl("linear", &linear_nested); }
TORCH_LIBRARY_IMPL(qshard, NestedTensorCUDA, m) { m.impl("linear", &linear_nested); }
TORCH_LIBRARY_IMPL(qshard, NestedTensorPrivateUse3, m) { m.impl("linear", &linear_nested); }
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse3, m) {
  if (key_is_ours()) m.impl("linear", &aten_linear_nested);
}

}  // namespace qshard
