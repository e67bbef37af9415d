#include "ops/mlp/swiglu_mlp_backward.h"

#include "ops/linear/autograd.h"
#include "ops/mlp/swiglu_mlp_arguments.h"

namespace qshard {

using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;

SwigluMlpBackward::Edges::Edges(const SwigluMlpState& state)
    : gate_bias(state.has_up ? 4 : 3),
      up_bias(gate_bias + (state.gate_bias ? 1 : 0)),
      down_bias(up_bias + (state.up_bias ? 1 : 0)),
      residual(down_bias + (state.down_bias ? 1 : 0)),
      norm_weight(residual + (state.has_residual ? 1 : 0)),
      norm_bias(norm_weight + 1) {}

SwigluMlpBackward::Needs::Needs(AutogradContext* ctx, const SwigluMlpState& state,
                                const Edges& edge)
    : norm_weight(state.norm && ctx->needs_input_grad(edge.norm_weight)),
      norm_bias(state.norm && state.norm->has_bias && ctx->needs_input_grad(edge.norm_bias)),
      input(ctx->needs_input_grad(edge.input) || norm_weight || norm_bias),
      gate(ctx->needs_input_grad(edge.gate)),
      up(state.has_up && ctx->needs_input_grad(edge.up)),
      down(ctx->needs_input_grad(edge.down)),
      gate_bias(state.gate_bias && ctx->needs_input_grad(edge.gate_bias)),
      up_bias(state.up_bias && ctx->needs_input_grad(edge.up_bias)) {}

SwigluMlpBackward::SwigluMlpBackward(AutogradContext* ctx, Node* node, const Tensor& grad)
    : ctx_(ctx),
      node_(node),
      grad_(grad),
      state_(load_state<SwigluMlpState>(ctx)),
      saved_(ctx->get_saved_variables()),
      edge_(state_),
      needs_(ctx, state_, edge_),
      // Nothing reads codes where biases alone are trained.
      gives_codes_(state_.gives_codes && (needs_.input || needs_.gate || needs_.up)) {
  if (state_.norm) normed_ = NormedInput::restore(*state_.norm, &saved_[kSavedNorm]);
}

variable_list SwigluMlpBackward::run() {
  if (state_.has_residual && !state_.adds_input && ctx_->needs_input_grad(edge_.residual)) {
    result_[kResidual] = grad_;
  }
  at::AutoDispatchBelowAutograd guard;
  if (needs_.inner() || needs_.down) backward_of_down();
  if (state_.down_bias && ctx_->needs_input_grad(edge_.down_bias)) {
    result_[kDownBias] = bias_gradient(grad_, *state_.down_bias);
  }
  if (!needs_.inner()) {
    if (state_.adds_input && ctx_->needs_input_grad(edge_.input)) result_[kInput] = grad_;
    return std::move(result_);
  }
  Tensor grad_input = backward_of_gate_and_up();
  if (normed_ && needs_.input) grad_input = backward_of_norm(grad_input);
  if (ctx_->needs_input_grad(edge_.input)) result_[kInput] = grad_input;
  set_inner_biases();
  return std::move(result_);
}

void SwigluMlpBackward::backward_of_down() {
  const Tensor& gate_values = saved_[kGateValues];
  const Tensor& up_values = saved_[kUpValues];
  // up is not saved where nothing reads it: gate stands in for it.
  const bool is_up_kept = !state_.has_up || up_values.defined();
  const GateAndUp values(gate_values, is_up_kept ? up_values : gate_values, state_.is_joined);
  const RestoredWeight down(state_.down, &saved_[kSavedDown], grad_);
  const GradSink into(needs_.down ? node_ : nullptr, edge_.down, down.weight, grad_, gate_values);
  const auto format = gives_codes_ ? OptionalFormat(state_.grad_format) : std::nullopt;
  static const auto op =
      typed_op<decltype(swiglu_linear_backward)>("qshard::swiglu_linear_backward");
  const auto sum = into.leaf.sum.defined() ? OptionalTensor(into.leaf.sum) : std::nullopt;
  OptionalTensor sums;
  if (gives_codes_ && needs_.inner_biases()) {
    const int64_t features = values.gate.size(-1) * (values.up ? 2 : 1);
    sums = inner_biases_ = at::empty({features}, gate_values.options().dtype(at::kFloat));
  }
  Tensor grad_down;
  std::tie(grad_down, gate_.rows, gate_.columns, up_.rows, up_.columns) =
      op.call(grad_, values.gate, values.up, down.weight, saved_[kMaxima], needs_.down,
              needs_.input, gives_codes_ ? needs_.gate || needs_.up : needs_.inner_weights(),
              state_.is_joined, format, state_.weight_only, into.dtype, OptionalFormat(down.format),
              down.state, sum, offs(), state_.activation, sums);
  if (needs_.down && !sum) result_[kDown] = grad_down;
}

Tensor SwigluMlpBackward::backward_of_gate_and_up() {
  if (normed_ && (needs_.gate || needs_.up)) columns_ = normed_->columns();
  Tensor grad_input = backward_of_first({.grad = gate_,
                                         .facts = state_.gate,
                                         .saved_input = kGateInput,
                                         .saved_weight = kSavedGate,
                                         .saves_codes = state_.gate_saves_codes,
                                         .needs_weight = needs_.gate,
                                         .edge = edge_.gate,
                                         .grad_weight = result_[kGate]},
                                        {});
  if (state_.has_up) {
    // A GEMM adds to the first one, which nothing else refers to yet; gradients in values are
    // rounded before they are added, as autograd does it.
    const bool is_added = needs_.input && gives_codes_ && !offs();  // which no GEMM of experts does
    const Tensor other = backward_of_first({.grad = up_,
                                            .facts = state_.up,
                                            .saved_input = kUpInput,
                                            .saved_weight = kSavedUp,
                                            .saves_codes = state_.up_saves_codes,
                                            .needs_weight = needs_.up,
                                            .edge = edge_.up,
                                            .grad_weight = result_[kUp]},
                                           is_added ? grad_input : Tensor());
    if (needs_.input) grad_input = is_added ? other : grad_input + other;
  }
  columns_.reset();
  return grad_input;
}

Tensor SwigluMlpBackward::backward_of_first(const FirstLinear& linear, const Tensor& earlier) {
  if (!needs_.input && !linear.needs_weight) return Tensor();
  const Tensor& gate_values = saved_[kGateValues];
  const RestoredWeight weight(linear.facts, &saved_[linear.saved_weight], grad_);
  const Tensor& input =
      restored_input(normed_ ? columns_ : saved_[linear.saved_input], gate_values);
  const bool is_quantized = linear.saves_codes && linear.needs_weight;
  const GradSink into(linear.needs_weight ? node_ : nullptr, linear.edge, weight.weight,
                      linear.grad.rows, input);
  const LinearGrad grad = gives_codes_ ? LinearGrad{linear.grad.rows, linear.grad.columns,
                                                    gate_values.sizes(), gate_values.scalar_type()}
                                       : LinearGrad{linear.grad.rows};
  auto [grad_input, grad_weight] =
      linear_gradients(into, grad, weight, input, is_quantized, needs_.input, linear.needs_weight,
                       state_.weight_only, earlier, offs());
  if (linear.needs_weight) linear.grad_weight = grad_weight;
  return grad_input;
}

Tensor SwigluMlpBackward::backward_of_norm(const Tensor& grad_normed) {
  // The gradient of an input that is the residual, too, is added as the norm's is written.
  auto [grad_input, grad_weight, grad_bias] = normed_->backward(
      grad_normed, state_.adds_input ? grad_ : Tensor(), needs_.norm_weight || needs_.norm_bias);
  if (needs_.norm_weight) result_[kNormWeight] = grad_weight;
  if (needs_.norm_bias) result_[kNormBias] = grad_bias;
  return grad_input;
}

void SwigluMlpBackward::set_inner_biases() {
  if (inner_biases_.defined()) {
    // That of a joined bias is whole.
    const auto sums = state_.has_up ? inner_biases_.chunk(2) : variable_list{inner_biases_};
    if (needs_.gate_bias) result_[kGateBias] = sums[0].to(*state_.gate_bias);
    if (needs_.up_bias) result_[kUpBias] = sums[1].to(*state_.up_bias);
    return;
  }
  if (needs_.gate_bias) result_[kGateBias] = bias_gradient(gate_.rows, *state_.gate_bias);
  if (needs_.up_bias) result_[kUpBias] = bias_gradient(up_.rows, *state_.up_bias);
}

}  // namespace qshard
