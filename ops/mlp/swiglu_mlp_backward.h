// The backward of swiglu_mlp as steps, and what its forward keeps for them.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "ops/linear/kept_operands.h"
#include "ops/linear/normed_input.h"

namespace qshard {

/// What forward keeps beside the saved tensors.
struct SwigluMlpState {
  bool is_joined = false;  // gate's values are halves: of gate, and of up
  bool has_up = false;     // a weight of its own
  bool has_residual = false;
  bool adds_input = false;  // the residual is the input that is normalized
  bool gate_saves_codes = false;
  bool up_saves_codes = false;
  bool weight_only = false;
  bool gives_codes = false;  // the gradients of gate and up reach their linears in codes
  std::string grad_format = {};
  std::string activation = {};
  std::optional<at::ScalarType> gate_bias = {}, up_bias = {}, down_bias = {};
  WeightFacts gate = {}, up = {}, down = {};
  std::optional<NormFacts> norm = {};
  auto fields() {
    return std::tie(is_joined, has_up, has_residual, adds_input, gate_saves_codes, up_saves_codes,
                    weight_only, gives_codes, grad_format, activation, gate_bias, up_bias,
                    down_bias, gate, up, down, norm);
  }
};

/// The saved tensors.
enum SwigluMlpSaved : size_t {
  kGateInput,
  kUpInput,
  kGateValues,
  kUpValues,
  kMaxima,
  kSavedGate,
  kSavedUp = kSavedGate + KeptWeight::kSaved,
  kSavedDown = kSavedUp + KeptWeight::kSaved,
  kSavedNorm = kSavedDown + KeptWeight::kSaved,
  kSavedOffs = kSavedNorm,  // experts have no norm, and keep offs in its place
};

/// The arguments of forward, and so the results of backward.
enum SwigluMlpArgument : size_t {
  kInput,
  kGate,
  kDown,
  kUp,
  kGateBias,
  kUpBias,
  kDownBias,
  kResidual,
  kNormWeight,
  kNormBias,
  kArguments = 22
};

/// One evaluation of the function's node. `node` is null where the engine does not evaluate it.
class SwigluMlpBackward {
 public:
  SwigluMlpBackward(torch::autograd::AutogradContext* ctx, torch::autograd::Node* node,
                    const Tensor& grad);
  torch::autograd::variable_list run();

 private:
  /// Edges are numbered by the tensors that forward was given, without undefined ones.
  struct Edges {
    size_t input = 0, gate = 1, down = 2, up = 3;
    size_t gate_bias, up_bias, down_bias, residual, norm_weight, norm_bias;
    explicit Edges(const SwigluMlpState& state);
  };
  /// Which gradients are asked for; `input` is also true for those of the norm's parameters.
  struct Needs {
    bool norm_weight, norm_bias, input, gate, up, down, gate_bias, up_bias;
    Needs(torch::autograd::AutogradContext* ctx, const SwigluMlpState& state, const Edges& edge);

    bool inner_biases() const { return gate_bias || up_bias; }
    bool inner_weights() const { return gate || up || inner_biases(); }
    bool inner() const { return input || inner_weights(); }
  };
  /// A gradient of gate's or up's values: these, or codes by rows and by columns.
  struct InnerGrad {
    Tensor rows, columns;
  };
  /// The linear of gate or of up.
  struct FirstLinear {
    const InnerGrad& grad;
    const WeightFacts& facts;
    size_t saved_input, saved_weight;
    bool saves_codes, needs_weight;
    size_t edge;
    Tensor& grad_weight;
  };

  /// Sets down's gradient and the inner ones.
  void backward_of_down();
  /// Returns the gradient of what gate and up multiply, and sets those of their weights.
  Tensor backward_of_gate_and_up();
  /// Its gradient of the input, plus `earlier` if that is defined.
  Tensor backward_of_first(const FirstLinear& linear, const Tensor& earlier);
  /// The gradient of the norm's input, for that of its output; sets those of its parameters.
  Tensor backward_of_norm(const Tensor& grad_normed);
  void set_inner_biases();
  OptionalTensor offs() const {
    const bool are_there = !state_.norm && saved_.size() > kSavedOffs;
    return are_there ? OptionalTensor(saved_[kSavedOffs]) : std::nullopt;
  }

  torch::autograd::AutogradContext* ctx_;
  torch::autograd::Node* node_;
  const Tensor& grad_;
  SwigluMlpState state_;
  torch::autograd::variable_list saved_;
  Edges edge_;
  Needs needs_;
  bool gives_codes_;
  InnerGrad gate_, up_;
  Tensor inner_biases_;  // the sums of both over rows, where they pass in codes
  Tensor columns_;       // of what is normalized
  std::optional<NormedInput> normed_;
  torch::autograd::variable_list result_{kArguments};
};

}  // namespace qshard
