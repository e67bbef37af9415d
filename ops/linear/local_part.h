// The mark by which leaf_grad() knows a node that hands a linear the local tensor of a DTensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <vector>

namespace qshard {

/// Marks the autograd node that hands a linear the local tensor of a DTensor and does nothing else:
/// its backward makes a DTensor, placed as the leaf, of the gradient. It is a hook because a node
/// owns its hooks, so that the mark is found by its type and dies with the node. It changes no
/// gradient.
struct LocalPart : torch::autograd::FunctionPreHook {
  /// The local tensors of the leaf and of its .grad; none where these are placed differently.
  virtual std::vector<at::Tensor> local_tensors() const = 0;

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
};

}  // namespace qshard
