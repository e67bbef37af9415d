#include "ops/linear/grouped_linear.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "dispatch/parts/kernel_bridge.h"
#include "ops/linear/autograd.h"
#include "ops/linear/linear_operands.h"

namespace qshard {
namespace {

constexpr const char* kGroupedLinear = "qshard::grouped_linear";

/// The first `count` arguments of a call of transformers' operators, input (T, in), weight
/// (experts, in, out) and offs first; none where the experts do not multiply as linears.
std::optional<std::vector<Tensor>> expert_operands(const torch::jit::Stack& stack, size_t count) {
  const auto arguments = torch::jit::last(stack, count);
  std::vector<Tensor> tensors;
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor()) return std::nullopt;
    tensors.push_back(argument.toTensor());
  }
  const auto& [input, weight, offs] = std::tie(tensors[0], tensors[1], tensors[2]);
  const bool fits = multiplies_experts(input, weight, offs, std::nullopt, std::nullopt) &&
                    input.scalar_type() == weight.scalar_type() &&
                    std::none_of(tensors.begin() + 3, tensors.end(), has_key);
  if (!fits) return std::nullopt;
  tensors[1] = weight.transpose(1, 2);
  tensors[2] = offs.to(at::kInt).contiguous();  // the operator takes int64, too
  return tensors;
}

/// Calls the kernel that transformers registered for all devices.
void call_transformers(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
}

}  // namespace

ExpertWeights experts_for_use(const Tensor& weight, std::optional<c10::string_view> format,
                              const WeightState& state, WeightUse use, const char* op) {
  if (has_key(weight) || !format || use == WeightUse::kForward) {
    check_format_name(weight, format, op);
    ExpertWeights experts = expert_weights(weight, op);
    if (state && state->size() == 2) {  // delayed scaling's, of a tensor over saved planes
      experts.stack.amax_history = (*state)[0];
      experts.stack.scaling_amax = (*state)[1];
    }
    return experts;
  }
  const int64_t count = weight.size(0), rows = weight.size(1);
  if (use == WeightUse::kWgradOnly) {  // which reads no codes of the weight: one stands for all
    const Tensor one = weight.new_empty({1, 1}).expand({rows, weight.size(2)});
    return {weight_for_use(one, format, state, use, op), count, rows, /*step=*/0};
  }
  // A hook on saved tensors made plain values of it.
  check_codes_can_be_made_again(checked_format(*format, op), op);
  return expert_weights(quantize(weight, *format, false, std::nullopt, 0), op);
}

GroupedForward grouped_linear_forward(const Tensor& input, const Tensor& weight, const Tensor& offs,
                                      bool weight_only, std::optional<c10::string_view> format,
                                      bool saves_input) {
  check_groups(input, weight, offs, kGroupedLinear);
  const ExpertWeights experts =
      experts_for_use(weight, format, std::nullopt, WeightUse::kForward, kGroupedLinear);
  check_expected_format(experts.stack, format);
  return grouped_forward(given_operand(input, *experts.stack.codes.format, kGroupedLinear), experts,
                         {offs.contiguous()}, weight_only, saves_input);
}

InputUse input_use_of_experts(const Tensor& input, const Tensor& weight, const LinearNeeds& needs,
                              bool weight_only) {
  InputUse use;
  // As of a linear's input: one without a gradient is kept as it is, since other linears may keep
  // it.
  if (weight_only || !needs.input || !needs.reads_input() || !input.is_cuda() || input.dim() != 2 ||
      has_key(input) || !has_key(weight) || is_traced_or_subclass(input) ||
      is_traced_or_subclass(weight) || !is_stack(weight) || input.size(1) != weight.size(2)) {
    return use;
  }
  use.saves_codes =
      can_save_expert_codes(input, expert_weights(weight, kGroupedLinear), weight_only);
  return use;
}

LinearBackward grouped_linear_backward(const GroupedLinearBackward& call, bool needs_weight,
                                       const Tensor& sum, at::ScalarType dtype) {
  const auto& [given, weight, input, input_is_codes, offs, needs_input, weight_only, format,
               weight_state, input_sum, codes] = call;
  // Nothing is read of a gradient in codes but its size.
  const Tensor grad = codes ? at::empty({1, 1}, given.options().dtype(codes->dtype))
                                  .expand({codes->total, weight.size(1)})
                            : given;
  constexpr const char* kBackward = "qshard::linear_backward";
  check_groups(grad, weight.transpose(-1, -2), offs, kBackward);
  TORCH_CHECK(
      !needs_weight || input_is_codes ||
          (input.dim() == 2 && input.size(0) == grad.size(0) && input.size(1) == weight.size(2) &&
           is_value_dtype(input.scalar_type()) && input.device() == grad.device()),
      fmt::format("{}: an input of shape {} does not fit a gradient of shape {} and a "
                  "weight of shape {}",
                  kBackward, input.sizes(), grad.sizes(), weight.sizes()));
  TORCH_CHECK(!sum.defined() || (sum.sizes() == weight.sizes() && sum.is_contiguous() &&
                                 sum.device() == grad.device()),
              fmt::format("{}: weight_grad must be contiguous, of shape {} on {}, got {}",
                          kBackward, weight.sizes(), grad.device().str(), describe(sum)));
  TORCH_CHECK(!is_given(input_sum),
              fmt::format("{}: has no input_sum beside offs; add the gradient of the input that it "
                          "returns",
                          kBackward));
  const ExpertWeights experts =
      experts_for_use(weight, format, weight_state, backward_use(needs_input), kBackward);
  const RowGroups groups{offs.contiguous()};
  std::optional<GroupCodes> grad_codes;
  if (codes) {
    grad_codes = restored_codes(
        needs_input ? given : Tensor(), needs_weight ? codes->columns : Tensor(),
        *experts.stack.codes.format, OperandRole::kGradient, codes->total, weight.size(1), groups);
  }
  const auto given_as = [&](const Tensor& x) {
    return given_operand(x, *experts.stack.codes.format, kBackward);
  };
  return grouped_backward({.grad = codes ? GivenOperand(grad) : given_as(grad),
                           .grad_codes = std::move(grad_codes),
                           .needs_input = needs_input,
                           .input = !needs_weight    ? GivenOperand()
                                    : input_is_codes ? GivenOperand(input)
                                                     : given_as(input),
                           .input_is_codes = input_is_codes && needs_weight,
                           .weight_grad_dtype = dtype,
                           .sum = sum,
                           .weight_only = weight_only},
                          experts, groups);
}

Tensor grouped_linear(const Tensor& input, const Tensor& weight, const Tensor& offs,
                      bool weight_only, std::optional<c10::string_view> format) {
  check_format_name(weight, format, kGroupedLinear);
  return std::get<0>(linear_forward_op(input, quantized_on_use(weight, format), std::nullopt,
                                       /*save_quantized_input=*/false, weight_only, std::nullopt,
                                       std::nullopt, std::nullopt, std::nullopt, offs));
}

void transformers_grouped_mm(const c10::OperatorHandle& op, c10::DispatchKeySet,
                             torch::jit::Stack* stack) {
  constexpr size_t kArguments = 3;
  if (op.schema().arguments().size() != kArguments) return call_transformers(op, stack);
  Tensor product;
  {
    PlainGuard guard;
    const auto operands = expert_operands(*stack, kArguments);
    if (operands) {
      const auto& [input, weight, offs] = std::tie((*operands)[0], (*operands)[1], (*operands)[2]);
      c10::OptionalDeviceGuard device_guard(input.device());
      product =
          grouped_linear_forward(input, weight, offs, /*weight_only=*/false, std::nullopt).output;
    }
  }
  if (!product.defined()) return call_transformers(op, stack);
  torch::jit::drop(*stack, kArguments);
  torch::jit::push(*stack, std::move(product));
}

void transformers_grouped_mm_backward(const c10::OperatorHandle& op, c10::DispatchKeySet,
                                      torch::jit::Stack* stack) {
  constexpr size_t kArguments = 4;
  if (op.schema().arguments().size() != kArguments) return call_transformers(op, stack);
  LinearBackward gradients;
  {
    PlainGuard guard;
    const auto operands = expert_operands(*stack, kArguments);
    if (operands) {
      const auto& [input, weight, offs] = std::tie((*operands)[0], (*operands)[1], (*operands)[2]);
      const Tensor& grad = (*operands)[3];
      c10::OptionalDeviceGuard device_guard(input.device());
      gradients =
          grouped_linear_backward({grad, weight, input, /*input_is_codes=*/false, offs,
                                   /*needs_input=*/true, /*weight_only=*/false, std::nullopt,
                                   /*weight_state=*/std::nullopt, /*input_sum=*/std::nullopt},
                                  /*needs_weight=*/true, Tensor(), weight.scalar_type());
    }
  }
  if (!gradients.grad_input.defined()) return call_transformers(op, stack);
  torch::jit::drop(*stack, kArguments);
  torch::jit::push(*stack, std::move(gradients.grad_input), gradients.grad_weight.transpose(1, 2));
}

void check_grouped_sizes(const char* op, const Tensor& x, const Tensor& weight, int64_t weight_dim,
                         const Tensor& offs) {
  TORCH_CHECK(
      x.dim() == 2 && weight.dim() == 3 && offs.dim() == 1 && offs.scalar_type() == at::kInt,
      fmt::format("{}: needs a matrix, a weight (experts, out, in) and int32 offs "
                  "(experts,), got {}, {} and {} dimensions and offs of {}",
                  op, x.dim(), weight.dim(), offs.dim(), c10::toString(offs.scalar_type())));
  TORCH_SYM_CHECK(x.sym_size(1).sym_eq(weight.sym_size(weight_dim)),
                  fmt::format("{}: a matrix of shape {} does not fit a weight of shape {}", op,
                              c10::str(x.sym_sizes()), c10::str(weight.sym_sizes())));
  TORCH_SYM_CHECK(offs.sym_size(0).sym_eq(weight.sym_size(0)),
                  fmt::format("{}: offs of shape {} do not fit a weight of shape {}", op,
                              c10::str(offs.sym_sizes()), c10::str(weight.sym_sizes())));
}

Tensor grouped_linear_meta(const Tensor& input, const Tensor& weight, const Tensor& offs, bool,
                           std::optional<c10::string_view> format) {
  if (format) checked_format(*format, kGroupedLinear);
  check_grouped_sizes(kGroupedLinear, input, weight, 2, offs);
  return at::empty_symint({input.sym_size(0), weight.sym_size(1)}, input.options());
}

}  // namespace qshard
