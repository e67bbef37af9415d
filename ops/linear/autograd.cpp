// Autograd of the public operators. The low-precision work stays in opaque operators, so that
// tracing records one node for each and never looks inside a quantized tensor.
#include <ATen/ops/_grouped_mm_ops.h>
#include <torch/csrc/autograd/custom_function.h>

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "ops/calls/ops.h"
#include "ops/calls/saved_state.h"
#include "ops/linear/autograd.h"
#include "ops/linear/grouped_linear.h"
#include "ops/linear/normed_input.h"

namespace qshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Rounding passes the gradient straight through.
struct QuantizeFunction : Function<QuantizeFunction> {
  static Tensor forward(AutogradContext*, const Tensor& self, c10::string_view format,
                        bool keep_master, std::optional<c10::SymInt> logical_rows,
                        c10::SymInt row_offset) {
    at::AutoDispatchBelowAutograd guard;
    static const auto op = typed_op<decltype(quantize)>("qshard::quantize");
    return op.call(self, format, keep_master, std::move(logical_rows), std::move(row_offset));
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], {}, {}, {}, {}};
  }
};

struct DequantizeState {
  at::ScalarType dtype;
  auto fields() { return std::tie(dtype); }
};

struct DequantizeFunction : Function<DequantizeFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& self,
                        std::optional<at::ScalarType> dtype) {
    save_state(ctx, DequantizeState{self.scalar_type()});
    at::AutoDispatchBelowAutograd guard;
    static const auto op = typed_op<decltype(dequantize)>("qshard::dequantize");
    return op.call(self, dtype);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto [dtype] = load_state<DequantizeState>(ctx);
    return {grads[0].defined() ? grads[0].to(dtype) : Tensor(), {}};
  }
};

std::tuple<Tensor, Tensor> quantize_kept(const Tensor& input, c10::string_view format, bool columns,
                                         const OptionalTensor& amax, const OptionalTensor& weight) {
  static const auto op = typed_op<decltype(quantize_kept_input)>("qshard::_quantize_kept_input");
  return op.call(input, format, columns, amax, weight);
}

struct LinearState {
  WeightFacts weight = {};
  std::optional<std::string> kept_format = {};  // backward quantizes the kept input to it
  bool saves_codes = false;
  bool weight_only = false;
  std::optional<at::ScalarType> bias = {};
  bool has_residual = false;
  auto fields() {
    return std::tie(weight, kept_format, saves_codes, weight_only, bias, has_residual);
  }
};

struct LinearFunction : Function<LinearFunction> {
  static constexpr size_t kWeight = 1;  // among the tensors given to forward
  static constexpr size_t kArguments = 10;
  static constexpr size_t kOffs = 2 + KeptWeight::kSaved;  // among those saved, of experts

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, bool weight_only, bool records_grad,
                        std::optional<c10::string_view> format, const WeightState& weight_state,
                        const OptionalTensor& residual, bool input_is_kept,
                        const OptionalTensor& offs) {
    at::AutoDispatchBelowAutograd guard;
    static const auto op = typed_op<decltype(linear_forward_op)>("qshard::linear_forward");
    const Format* kept = input_is_kept && !weight_only && !weight_state
                             ? input_codes_format(input, weight, format)
                             : nullptr;
    const LinearNeeds needs(records_grad, input, weight);
    const InputUse use = is_given(offs)
                             ? input_use_of_experts(input, weight, needs, weight_only)
                             : InputUse(input, weight, needs, weight_only, format, input_is_kept);
    const KeptWeight kept_weight(weight, needs.reads_weight(weight, offs), format, weight_state);
    OptionalTensor rows;
    Tensor columns, amax;
    if (kept != nullptr) {
      std::tie(rows, amax) =
          quantize_kept(input, kept->name, /*columns=*/false, std::nullopt, weight);
    } else if (use.quantizes_apart) {
      static const auto quantize = typed_op<decltype(quantize_input_op)>("qshard::quantize_input");
      auto codes = quantize.call(input, *format, use.multiplies_codes, use.saves_codes);
      if (use.multiplies_codes) rows = std::get<0>(codes);
      columns = std::get<1>(codes);
    }
    std::optional<InputCodeScope> share;
    if (records_grad && input.is_cuda() && !input_is_kept) share.emplace(input);
    const bool saves_by_itself = use.saves_codes && !use.quantizes_apart;
    const bool needs_format = use.quantizes_apart || weight_state || kept_weight.trusts_format();
    auto [output, saved] =
        op.call(input, weight, bias, saves_by_itself, weight_only, rows,
                needs_format ? format : std::nullopt, weight_state, residual, offs);
    if (saves_by_itself) columns = saved;
    const bool reads_input = needs.reads_input();
    variable_list to_save{!reads_input      ? Tensor()
                          : use.saves_codes ? columns
                                            : input,
                          reads_input ? amax : Tensor()};
    LinearState state{.weight = kept_weight.save(to_save),
                      .saves_codes = use.saves_codes,
                      .weight_only = weight_only,
                      .has_residual = is_given(residual)};
    if (kept != nullptr) state.kept_format = kept->name;
    if (is_given(bias)) state.bias = bias->scalar_type();
    if (is_given(offs)) to_save.push_back(*offs);
    save_state(ctx, std::move(state));
    ctx->save_for_backward(std::move(to_save));
    return output;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(kArguments);
    refuse_double_backward(grad, "qshard::linear");
    const auto state = load_state<LinearState>(ctx);
    auto saved = ctx->get_saved_variables();
    const bool needs_input = ctx->needs_input_grad(0);
    const bool needs_weight = ctx->needs_input_grad(1);
    bool saves_codes = state.saves_codes;
    if (state.kept_format && needs_weight) {
      at::AutoDispatchBelowAutograd guard;
      const auto amax = saved[1].numel() == 1 ? OptionalTensor(saved[1]) : std::nullopt;
      saved[0] = std::get<0>(
          quantize_kept(saved[0], *state.kept_format, /*columns=*/true, amax, std::nullopt));
      saves_codes = true;
    }
    Tensor grad_input, grad_weight, grad_bias;
    if (needs_input || needs_weight) {
      at::AutoDispatchBelowAutograd guard;
      const RestoredWeight weight(state.weight, &saved[2], grad);
      const Tensor& input = restored_input(saved[0], grad);
      auto* node = needs_weight ? evaluated_node<LinearFunction>(ctx) : nullptr;
      const GradSink into(node, kWeight, weight.weight, grad, input);
      std::tie(grad_input, grad_weight) =
          linear_gradients(into, {grad}, weight, input, saves_codes && needs_weight, needs_input,
                           needs_weight, state.weight_only, /*added=*/{},
                           saved.size() > kOffs ? OptionalTensor(saved[kOffs]) : std::nullopt);
    }
    if (state.bias && ctx->needs_input_grad(2)) grad_bias = bias_gradient(grad, *state.bias);
    const size_t residual = state.bias ? 3 : 2;
    const Tensor grad_residual =
        state.has_residual && ctx->needs_input_grad(residual) ? grad : Tensor();
    return {needs_input ? grad_input : Tensor(),
            needs_weight ? grad_weight : Tensor(),
            grad_bias,
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            grad_residual,
            Tensor(),
            Tensor()};
  }
};

}  // namespace

std::tuple<Tensor, Tensor> linear_gradients(const GradSink& into, const LinearGrad& grad,
                                            const RestoredWeight& weight, const Tensor& input,
                                            bool input_is_quantized, bool needs_input,
                                            bool needs_weight, bool weight_only,
                                            const Tensor& added, const OptionalTensor& offs) {
  static const auto op = typed_op<decltype(linear_backward_op)>("qshard::linear_backward");
  const bool is_added = added.defined() && !is_traced_or_subclass(added);
  const auto input_sum = is_added ? OptionalTensor(added) : std::nullopt;
  const auto weight_sum = into.leaf.sum.defined() ? OptionalTensor(into.leaf.sum) : std::nullopt;
  auto [grad_input, grad_weight] =
      op.call(grad.rows, weight.weight, input, input_is_quantized, needs_input, needs_weight,
              weight_only, into.dtype, std::optional<c10::string_view>(weight.format), weight.state,
              grad.columns, grad.size, grad.dtype, input_sum, weight_sum, offs, grad.scale);
  if (is_added) {
    grad_input = added;
  } else if (added.defined()) {
    grad_input = added + grad_input;
  }
  return {grad_input, weight_sum ? Tensor() : grad_weight};
}

Tensor quantize_autograd(const Tensor& self, c10::string_view format, bool keep_master,
                         std::optional<c10::SymInt> logical_rows, c10::SymInt row_offset) {
  return QuantizeFunction::apply(self, format, keep_master, std::move(logical_rows),
                                 std::move(row_offset));
}

Tensor quantized_on_use_autograd(const Tensor& weight, std::optional<c10::string_view> format) {
  return is_quantized_on_use(weight, format)
             ? quantize_autograd(weight, *format, false, std::nullopt, 0)
             : weight;
}

Tensor dequantize_autograd(const Tensor& self, std::optional<at::ScalarType> dtype) {
  return DequantizeFunction::apply(self, dtype);
}

Tensor codes_autograd(const Tensor& self) {
  at::AutoDispatchBelowAutograd guard;
  static const auto op = typed_op<decltype(codes)>("qshard::codes");
  return op.call(self);
}

Tensor scale_inv_autograd(const Tensor& self) {
  at::AutoDispatchBelowAutograd guard;
  static const auto op = typed_op<decltype(scale_inv)>("qshard::scale_inv");
  return op.call(self);
}

Tensor tensor_scale_inv_autograd(const Tensor& self) {
  at::AutoDispatchBelowAutograd guard;
  static const auto op = typed_op<decltype(tensor_scale_inv)>("qshard::tensor_scale_inv");
  return op.call(self);
}

Tensor columnwise_codes_autograd(const Tensor& self) {
  at::AutoDispatchBelowAutograd guard;
  static const auto op = typed_op<decltype(columnwise_codes)>("qshard::columnwise_codes");
  return op.call(self);
}

Tensor columnwise_scale_inv_autograd(const Tensor& self) {
  at::AutoDispatchBelowAutograd guard;
  static const auto op = typed_op<decltype(columnwise_scale_inv)>("qshard::columnwise_scale_inv");
  return op.call(self);
}

Tensor row_image_autograd(const Tensor& self) {
  at::AutoDispatchBelowAutograd guard;
  static const auto op = typed_op<decltype(row_image)>("qshard::row_image");
  return op.call(self);
}

OptionalTensor master_autograd(const Tensor& self) {
  at::AutoDispatchBelowAutograd guard;
  static const auto op = typed_op<decltype(master)>("qshard::master");
  return op.call(self);
}

Tensor linear_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       bool weight_only, std::optional<c10::string_view> format,
                       const WeightState& weight_state, const OptionalTensor& residual,
                       bool input_is_kept) {
  TORCH_CHECK_VALUE(!weight_state || format,
                    "qshard::linear: weight_state is given, so format must name the weight's");
  if (!weight_state) check_format_name(weight, format, "qshard::linear");
  if (goes_the_way_of_matmul(weight)) {
    return linear_of_view(input, weight, bias, weight_only, residual);
  }
  const Tensor quantized = weight_state ? weight : quantized_on_use_autograd(weight, format);
  return LinearFunction::apply(input, quantized, bias, weight_only, at::GradMode::is_enabled(),
                               format, weight_state, residual, input_is_kept, std::nullopt);
}

Tensor grouped_linear_autograd(const Tensor& input, const Tensor& weight, const Tensor& offs,
                               bool weight_only, std::optional<c10::string_view> format) {
  check_format_name(weight, format, "qshard::grouped_linear");
  return LinearFunction::apply(input, quantized_on_use_autograd(weight, format), std::nullopt,
                               weight_only, at::GradMode::is_enabled(), format, std::nullopt,
                               std::nullopt,
                               /*input_is_kept=*/false, offs);
}

Tensor aten_linear_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const auto plain = [](const Tensor& tensor) {
    return has_key(tensor) ? DequantizeFunction::apply(tensor, std::nullopt) : tensor;
  };
  const auto plain_bias = bias && bias->defined() ? OptionalTensor(plain(*bias)) : std::nullopt;
  if (!has_key(weight)) return at::linear(plain(input), weight, plain_bias);
  if (goes_the_way_of_matmul(weight)) return linear_by_matmul(plain(input), weight, plain_bias);
  return LinearFunction::apply(rows_of_their_own(input) ? input : plain(input), weight, plain_bias,
                               /*weight_only=*/false, at::GradMode::is_enabled(), std::nullopt,
                               std::nullopt, std::nullopt, /*input_is_kept=*/false, std::nullopt);
}

Tensor aten_grouped_mm_autograd(const Tensor& input, const Tensor& weight,
                                const OptionalTensor& offs, const OptionalTensor& bias,
                                std::optional<at::ScalarType> out_dtype) {
  if (!multiplies_experts(input, weight, offs, bias, out_dtype)) {
    // torch's own formula, which keeps quantized operands. This function stands in its place at
    // AutogradPrivateUse3, and torch registers it for AutogradOther, too.
    constexpr c10::DispatchKeySet kStock({c10::DispatchKey::AutogradOther, kKey});
    return at::_ops::_grouped_mm::redispatch(kStock, input, weight, offs, bias, out_dtype);
  }
  TORCH_CHECK(input.scalar_type() == weight.scalar_type(),
              fmt::format("aten::_grouped_mm: expected both matrices to have the same dtype, but "
                          "got {} and {}",
                          c10::toString(input.scalar_type()), c10::toString(weight.scalar_type())));
  return LinearFunction::apply(input, weight.transpose(1, 2), std::nullopt, /*weight_only=*/false,
                               at::GradMode::is_enabled(), std::nullopt, std::nullopt, std::nullopt,
                               /*input_is_kept=*/false, offs);
}

}  // namespace qshard
