#include "ops/loss/linear_cross_entropy.h"

#include <fmt/format.h>

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "ops/calls/saved_state.h"
#include "ops/linear/autograd.h"
#include "ops/linear/linear_operands.h"

namespace qshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr const char* kOp = "qshard::linear_cross_entropy";

/// The options of a call.
struct HeadCall {
  bool is_mean;
  bool in_bfloat16;  // forward
  int64_t ignore_index;
  double label_smoothing;

  HeadCall(const Tensor& input, const Tensor& weight, const Tensor& target,
           const OptionalTensor& bias, c10::string_view reduction, int64_t ignore_index,
           double label_smoothing, OptionalFormat forward_precision)
      : is_mean(reduction == "mean"),
        in_bfloat16(forward_precision.has_value()),
        ignore_index(ignore_index),
        label_smoothing(label_smoothing) {
    TORCH_CHECK_VALUE(is_mean || reduction == "sum", kOp, ": reduction is 'mean' or 'sum', got '",
                      std::string(reduction),
                      "'; torch.nn.functional.cross_entropy of the logits has losses per token");
    TORCH_CHECK_VALUE(!in_bfloat16 || *forward_precision == "bf16", kOp,
                      ": forward_precision is 'bf16' or None, got '",
                      std::string(forward_precision.value_or("")), "'");
    const bool fits =
        input.dim() >= 1 && weight.dim() == 2 && input.sym_size(-1) == weight.sym_size(1) &&
        is_value_dtype(input.scalar_type()) &&
        (!is_given(bias) || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)));
    TORCH_CHECK(fits, kOp, ": input ", input.scalar_type(), " ", input.sym_sizes(), ", weight ",
                weight.sym_sizes(), " and bias ",
                is_given(bias) ? c10::str(bias->sym_sizes()) : std::string("none"),
                " do not go together: the input is float32, bfloat16 or float16 (..., columns), "
                "the weight (words, columns), and the bias (words,)");
    TORCH_CHECK(!goes_the_way_of_matmul(weight), kOp,
                ": the weight is a view of a quantized tensor that is no matrix of its rows; call "
                "torch.nn.functional.cross_entropy(input @ weight.t(), target)");
    check_targets(kOp, input, target, label_smoothing);
  }

  auto losses_of(const Tensor& logits, const Tensor& target, OptionalFormat grad_format, bool rows,
                 bool columns) const {
    static const auto op =
        typed_op<decltype(cross_entropy_and_gradient)>("qshard::cross_entropy_and_gradient");
    return op.call(logits, target, ignore_index, label_smoothing, grad_format, rows, columns);
  }
  Tensor reduced(const Tensor& totals) const {
    const Tensor sum = totals.select(0, 0);
    return is_mean ? at::div(sum, totals.select(0, 1)) : sum.clone();
  }
};

/// Null where traced code hides it and none is named.
/// @throws c10::ValueError for a plain weight without one.
const Format* format_of(const Tensor& weight, OptionalFormat name) {
  if (has_key(weight)) return buffer_of(weight).layout().format;
  if (name) return &checked_format(*name, kOp);
  TORCH_CHECK_VALUE(is_traced_or_subclass(weight), kOp,
                    ": the weight is plain; name the format that it is to be quantized to, or call "
                    "torch.nn.functional.cross_entropy");
  return nullptr;
}

/// Given for plain weights: eager code sees which are.
WeightState state_of(const Tensor& weight, const WeightState& given) {
  if (given || has_key(weight) || is_traced_or_subclass(weight)) return given;
  return std::vector<Tensor>();
}

/// Whether the gradient of logits (m, n) passes in codes.
bool gives_codes(const Tensor& input, const Tensor& weight, const Format* known,
                 at::ScalarType dtype) {
  if (known == nullptr || has_key(input) || !gives_gradients_in_codes(*known)) return false;
  for (const auto& size : {input.sym_numel(), weight.sym_size(0), weight.sym_size(1)}) {
    if (!is_known(size)) return false;
  }
  const int64_t m = leading_numel(input), n = weight.size(0), k = weight.size(1);
  return can_save_quantized_input(*known, input.device(), m, n, k) &&
         gradient_quantizes_input(*known, input.device(), dtype, m, n, k);
}

OptionalTensor in_bfloat16(const OptionalTensor& bias) {
  return is_given(bias) ? OptionalTensor(bias->to(at::kBFloat16)) : std::nullopt;
}

/// Logits, and what the weight's gradient reads of the input.
struct Logits {
  Tensor values, kept_input;
  bool keeps_codes = false;

  /// Multiplied by codes.
  Logits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, bool keeps_codes,
         OptionalFormat format, const WeightState& state)
      : keeps_codes(keeps_codes) {
    std::tie(values, kept_input) = forward(input, weight, bias, keeps_codes, false, format, state);
    if (!keeps_codes) kept_input = input;
  }
  /// By the weight's values.
  Logits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
         OptionalFormat format, const WeightState& state)
      : kept_input(input.to(at::kBFloat16)) {
    const auto rounded_bias = in_bfloat16(bias);
    values =
        state ? at::linear(kept_input, weight.to(at::kBFloat16), rounded_bias)
              : std::get<0>(forward(kept_input, weight, rounded_bias, false, true, format, state));
  }

 private:
  static std::tuple<Tensor, Tensor> forward(const Tensor& input, const Tensor& weight,
                                            const OptionalTensor& bias, bool keeps_codes,
                                            bool weight_only, OptionalFormat format,
                                            const WeightState& state) {
    static const auto op = typed_op<decltype(linear_forward_op)>("qshard::linear_forward");
    return op.call(input, weight, bias, keeps_codes, weight_only, std::nullopt, format, state,
                   std::nullopt, std::nullopt);
  }
};

struct HeadState {
  WeightFacts weight = {};
  bool is_mean = true;
  std::string format = {};  // of gradients in codes
  bool in_codes = false;    // the gradient of logits, of size and dtype
  std::vector<int64_t> size = {};
  at::ScalarType dtype = at::kFloat;
  bool keeps_codes = false;  // of the input
  std::optional<at::ScalarType> bias = {};
  auto fields() {
    return std::tie(weight, is_mean, format, in_codes, size, dtype, keeps_codes, bias);
  }
};

struct LinearCrossEntropyFunction : Function<LinearCrossEntropyFunction> {
  static constexpr size_t kWeight = 1, kBias = 2;  // among the tensors given to forward
  static constexpr size_t kArguments = 8;
  enum Saved : size_t { kInput, kRows, kColumns, kTotals, kSavedWeight };

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, const Tensor& target, const HeadCall& call,
                        bool records_grad, OptionalFormat name, const WeightState& given) {
    at::AutoDispatchBelowAutograd guard;
    const Format* format = format_of(weight, name);
    const WeightState state = state_of(weight, given);
    const LinearNeeds needs(records_grad, input, weight);
    const bool needs_bias = records_grad && is_given(bias) && bias->requires_grad();
    const KeptWeight kept(weight, needs.reads_weight(), name, state);
    const bool needs_name = state || kept.trusts_format();
    const OptionalFormat checked = needs_name ? name : std::nullopt;
    const Logits logits =
        call.in_bfloat16
            ? Logits(input, weight, bias, checked, state)
            : Logits(input, weight, bias,
                     InputUse(input, weight, needs, /*weight_only=*/false, name).saves_codes,
                     checked, state);
    const bool columns = needs.weight || needs_bias;
    const auto dtype = logits.values.scalar_type();
    const bool in_codes = (needs.input || columns) && gives_codes(input, weight, format, dtype);
    const auto [losses, totals, rows, made_columns] = call.losses_of(
        logits.values, target, in_codes ? OptionalFormat(format->name) : std::nullopt,
        in_codes ? needs.input : needs.input || columns, in_codes && columns);
    variable_list saved{needs.reads_input() ? logits.kept_input : Tensor(), rows, made_columns,
                        totals};
    HeadState kept_state{.weight = kept.save(saved),
                         .is_mean = call.is_mean,
                         .in_codes = in_codes,
                         .dtype = dtype,
                         .keeps_codes = logits.keeps_codes};
    if (in_codes) {
      kept_state.format = std::string(format->name);
      kept_state.size = logits.values.sizes().vec();
    }
    if (is_given(bias)) kept_state.bias = bias->scalar_type();
    save_state(ctx, std::move(kept_state));
    ctx->save_for_backward(std::move(saved));
    return call.reduced(totals);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(kArguments);
    if (!grads[0].defined()) return result;
    refuse_double_backward(grads[0], kOp);
    const auto state = load_state<HeadState>(ctx);
    const auto saved = ctx->get_saved_variables();
    const bool needs_input = ctx->needs_input_grad(0);
    const bool needs_weight = ctx->needs_input_grad(kWeight);
    const bool needs_bias = state.bias && ctx->needs_input_grad(kBias);
    at::AutoDispatchBelowAutograd guard;
    // From the sum of losses to what was returned. Where all tokens are ignored, gradients are
    // zeros.
    Tensor factor = grads[0].to(at::kFloat).reshape({1});
    if (state.is_mean) factor = at::div(factor, saved[kTotals].narrow(0, 1, 1).clamp_min(1));
    const Tensor values = state.in_codes ? saved[kRows] : multiplied_by(saved[kRows], factor);
    const LinearGrad grad =
        state.in_codes ? LinearGrad{values, saved[kColumns], state.size, state.dtype, factor}
                       : LinearGrad{values};
    if (needs_input || needs_weight) {
      const RestoredWeight weight(state.weight, &saved[kSavedWeight], factor);
      const Tensor& input = restored_input(saved[kInput], factor);
      const GradSink into(needs_weight ? evaluated_node<LinearCrossEntropyFunction>(ctx) : nullptr,
                          kWeight, weight.weight, values, input);
      auto [grad_input, grad_weight] = linear_gradients(
          into, grad, weight, input, state.keeps_codes && needs_weight, needs_input, needs_weight,
          /*weight_only=*/false);
      if (needs_input) result[0] = grad_input;
      if (needs_weight) result[kWeight] = grad_weight;
    }
    if (needs_bias) {
      result[kBias] =
          state.in_codes ? column_sums(grad, state) : bias_gradient(values, *state.bias);
    }
    return result;
  }

 private:
  /// Multiplied in fp32, and rounded once.
  static Tensor multiplied_by(const Tensor& values, const Tensor& factor) {
    Tensor product = at::empty_like(values);
    return at::mul_out(product, values, factor);
  }
  /// The wgrad GEMM of an input of ones sums what codes stand for.
  static Tensor column_sums(const LinearGrad& grad, const HeadState& state) {
    static const auto op = typed_op<decltype(linear_backward_op)>("qshard::linear_backward");
    constexpr int64_t kColumns = 16;  // the fewest that GEMMs of codes take
    const int64_t words = state.size.back();
    const int64_t rows = c10::multiply_integers(state.size) / words;
    const auto options = grad.scale->options();
    const Tensor ones = at::ones({rows, kColumns}, options.dtype(state.dtype));
    const Tensor weight = at::empty({1, 1}, options).expand({words, kColumns});
    const auto made =
        op.call(grad.rows, weight, ones, /*input_is_quantized=*/false, /*needs_input=*/false,
                /*needs_weight=*/true, /*weight_only=*/false, at::kFloat, state.format,
                std::vector<Tensor>(), grad.columns, grad.size, grad.dtype, std::nullopt,
                std::nullopt, std::nullopt, grad.scale);
    return std::get<1>(made).select(1, 0).to(*state.bias, /*non_blocking=*/false, /*copy=*/true);
  }
};

}  // namespace

Tensor linear_cross_entropy(const Tensor& input, const Tensor& weight, const Tensor& target,
                            const OptionalTensor& bias, c10::string_view reduction,
                            int64_t ignore_index, double label_smoothing, OptionalFormat format,
                            const WeightState& weight_state, OptionalFormat forward_precision) {
  const HeadCall call(input, weight, target, bias, reduction, ignore_index, label_smoothing,
                      forward_precision);
  check_format_name(weight, format, kOp);
  format_of(weight, format);
  const WeightState state = state_of(weight, weight_state);
  const OptionalFormat checked = state ? format : std::nullopt;
  const Logits logits = call.in_bfloat16
                            ? Logits(input, weight, bias, checked, state)
                            : Logits(input, weight, bias, /*keeps_codes=*/false, checked, state);
  return call.reduced(
      std::get<1>(call.losses_of(logits.values, target, std::nullopt, false, false)));
}

Tensor linear_cross_entropy_autograd(const Tensor& input, const Tensor& weight,
                                     const Tensor& target, const OptionalTensor& bias,
                                     c10::string_view reduction, int64_t ignore_index,
                                     double label_smoothing, OptionalFormat format,
                                     const WeightState& weight_state,
                                     OptionalFormat forward_precision) {
  const HeadCall call(input, weight, target, bias, reduction, ignore_index, label_smoothing,
                      forward_precision);
  check_format_name(weight, format, kOp);
  return LinearCrossEntropyFunction::apply(input, weight, bias, target, call,
                                           at::GradMode::is_enabled(), format, weight_state);
}

Tensor linear_cross_entropy_meta(const Tensor& input, const Tensor& weight, const Tensor& target,
                                 const OptionalTensor& bias, c10::string_view reduction,
                                 int64_t ignore_index, double label_smoothing,
                                 OptionalFormat format, const WeightState&,
                                 OptionalFormat forward_precision) {
  const HeadCall call(input, weight, target, bias, reduction, ignore_index, label_smoothing,
                      forward_precision);
  if (format) checked_format(*format, kOp);
  return at::empty({}, input.options().dtype(at::kFloat));
}

}  // namespace qshard
