#include "ops/linear/leaf_grad.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "ops/linear/local_part.h"

namespace qshard {
namespace {

using at::Tensor;
using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// What AccumulateGrad locks while it adds: backwards in several threads may share a leaf.
struct NodeMutex : Node {
  static std::mutex& of(Node& node) { return node.*(&NodeMutex::mutex_); }
};

// Python modes and subclasses, functorch, tracers: they are shown one gradient, then its sum.
bool has_observer(std::initializer_list<Tensor> tensors) {
  using c10::DispatchKey;
  constexpr auto kObservers =
      c10::python_ks | c10::functorch_transforms_ks |
      c10::DispatchKeySet({DispatchKey::Functionalize, DispatchKey::FuncTorchDynamicLayerFrontMode,
                           DispatchKey::PreDispatch, DispatchKey::Tracer});
  const auto local = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = local.included_ - local.excluded_;
  for (const Tensor& tensor : tensors) keys = keys | tensor.key_set();
  return keys.has_any(kObservers);
}

// AccumulateGrad of an undefined gradient calls its hooks without one, or not at all.
bool has_hooks(AccumulateGrad& leaf) {
  return !leaf.tensor_pre_hooks().empty() || !leaf.pre_hooks().empty() ||
         !leaf.retains_grad_hooks().empty() || !leaf.post_hooks().empty() ||
         leaf.tensor_post_acc_grad_hooks() != nullptr;
}

// Anomaly mode and post hooks look at what a node returns. In torch.autograd.grad and in
// backward(inputs=...) the engine has a list of the nodes that it needs.
bool gradients_are_accumulated(Node& node) {
  if (at::GradMode::is_enabled() || torch::autograd::AnomalyMode::is_enabled()) return false;
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen != nullptr && chosen->empty() && node.post_hooks().empty();
}

bool is_on_current_stream(Node& leaf) {
  const auto stream = leaf.stream();
  return !stream ||
         *stream == c10::impl::VirtualGuardImpl(stream->device_type()).getStream(stream->device());
}

// What AccumulateGrad adds to in place, without a warning.
bool can_be_added_to(const Tensor& sum, const Tensor& variable, const Tensor& grad) {
  return sum.defined() && sum.layout() == at::kStrided && !has_key(sum) &&
         is_value_dtype(sum.scalar_type()) && sum.device() == grad.device() &&
         sum.sizes() == variable.sizes() && sum.is_contiguous() && !sum.is_inference() &&
         !sum.is_neg() && !sum._fw_grad(0).defined() &&
         torch::autograd::utils::obeys_layout_contract(sum, variable);
}

/// The mark of a node that has no other hook; else null.
const LocalPart* local_part(Node& function) {
  if (function.num_outputs() != 1 || function.pre_hooks().size() != 1 ||
      !function.tensor_pre_hooks().empty() || !function.retains_grad_hooks().empty() ||
      !function.post_hooks().empty()) {
    return nullptr;
  }
  return dynamic_cast<const LocalPart*>(function.pre_hooks()[0].get());
}

bool may_overlap(const Tensor& sum, const Tensor& operand) {
  return operand.has_storage() && sum.is_alias_of(operand);
}

}  // namespace

LeafGrad leaf_grad(Node& node, size_t edge, const Tensor& grad, const Tensor& input) {
  Node* function = node.next_edge(edge).function.get();
  auto* leaf = dynamic_cast<AccumulateGrad*>(function);
  const LocalPart* part = nullptr;
  if (leaf == nullptr && function != nullptr && (part = local_part(*function)) != nullptr) {
    leaf = dynamic_cast<AccumulateGrad*>(function->next_edge(0).function.get());
  }
  if (leaf == nullptr || !gradients_are_accumulated(node) || has_hooks(*leaf) ||
      !is_on_current_stream(*leaf)) {
    return {};
  }
  Tensor variable = leaf->variable;
  if (!variable.requires_grad() || variable.grad_fn() || has_observer({grad, input})) return {};
  LeafGrad found{{}, std::unique_lock(NodeMutex::of(*leaf))};
  Tensor sum = variable.mutable_grad();
  if (part != nullptr) {
    if (!sum.defined()) return {};
    const std::vector<Tensor> local = part->local_tensors();
    if (local.empty()) return {};
    variable = local[0];
    sum = local[1];
  }
  if (!has_observer({variable}) && can_be_added_to(sum, variable, grad) && !has_observer({sum}) &&
      !may_overlap(sum, grad) && !may_overlap(sum, input)) {
    found.sum = sum;
    return found;
  }
  return {};
}

std::optional<at::ScalarType> converted_grad_dtype(Node& node, size_t edge,
                                                   const Tensor& variable) {
  const auto& next = node.next_edge(edge);
  if (!next.is_valid()) return std::nullopt;
  const auto dtype = next.function->input_metadata(next.input_nr).grad_dtype();
  const bool is_converted = dtype && is_value_dtype(*dtype) && *dtype != variable.scalar_type();
  return is_converted ? dtype : std::nullopt;
}

}  // namespace qshard
