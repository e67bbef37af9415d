// Adding to the .grad of a leaf from within a node's backward, in place of autograd's
// AccumulateGrad.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <mutex>
#include <optional>

namespace qshard {

/// The .grad that a gradient is to be added to, which AccumulateGrad leaves alone while this lives.
struct LeafGrad {
  at::Tensor sum;  // undefined: return the gradient to autograd
  std::unique_lock<std::mutex> lock;
};

/// For edge `edge` of `node`, which autograd's engine evaluates in this thread. `sum` is defined
/// only if adding the gradient to it and returning an undefined one leaves what returning the
/// gradient would: a plain eager backward() reaches a leaf with a plain contiguous .grad on this
/// stream, and no hook or caller would see that gradient. A leaf may be a DTensor
/// (tensor_parallel/local.py): `sum` is then the local tensor of its .grad. `grad` and `input` are
/// what the gradient is made of.
LeafGrad leaf_grad(torch::autograd::Node& node, size_t edge, const at::Tensor& grad,
                   const at::Tensor& input);

/// The dtype that the engine converts the gradient of edge `edge` to (Tensor.grad_dtype), if it is
/// one of ours and not the dtype of `variable`.
std::optional<at::ScalarType> converted_grad_dtype(torch::autograd::Node& node, size_t edge,
                                                   const at::Tensor& variable);

/// The place that autograd has for a weight's gradient: it is added to `leaf.sum` if that is
/// defined, else returned, in `dtype` if that is given. `node` is null if the gradient is not
/// needed or the engine does not ask.
struct GradSink {
  LeafGrad leaf = {};
  std::optional<at::ScalarType> dtype = {};

  GradSink(torch::autograd::Node* node, size_t edge, const at::Tensor& weight,
           const at::Tensor& grad, const at::Tensor& input) {
    if (node == nullptr) return;
    leaf = leaf_grad(*node, edge, grad, input);
    if (!leaf.sum.defined()) dtype = converted_grad_dtype(*node, edge, weight);
  }
};

}  // namespace qshard
