#include "ops/linear/recorded_activation.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>

#include "dispatch/tensor/quantized_tensor_impl.h"

namespace qshard {
namespace {

// Autograd's own functions are traceable and return memory of their own, or views that autograd
// knows. Functions of other libraries, of Python and of compiled code are not, and may return any.
bool allocates_its_results(const torch::autograd::Node* function) {
  return dynamic_cast<const torch::autograd::TraceableFunction*>(function) != nullptr;
}

// Fused norms return `y.view(shape)`, a view of a base that nothing else uses.
bool is_only_tensor_of_its_memory(const at::Tensor& x) {
  return x.has_storage() && x.storage().use_count() == (x.is_view() ? 2 : 1);
}

bool was_recorded_on_current_stream(const at::TensorBase& tensor) {
  const auto stream = tensor.grad_fn()->input_metadata(tensor.output_nr()).stream();
  return stream == c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device());
}

}  // namespace

GraphRecord record_of_activation(const at::Tensor& x) {
  if (x.is_inference() || has_key(x) || x.unsafeGetTensorImpl()->is_python_dispatch()) return {};
  if (!x.requires_grad() || x.is_leaf() || x._version() != 0) return {};
  const at::TensorBase& base = x.is_view() ? x._base() : x;
  const bool has_own_memory = allocates_its_results(base.grad_fn().get());
  if (!has_own_memory) {
    const bool is_view_of_leaf = base.is_leaf() && base.requires_grad();
    if (is_view_of_leaf || !is_only_tensor_of_its_memory(x)) return {};
  }
  if (!was_recorded_on_current_stream(has_own_memory ? base : x)) return {};
  return x.grad_fn();
}

}  // namespace qshard
