// What the autograd functions of linears share.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/linear/linear.h"
#include "ops/calls/ops.h"
#include "ops/linear/kept_operands.h"
#include "ops/linear/leaf_grad.h"

namespace qshard {

template <typename Signature>
auto typed_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline void refuse_double_backward(const Tensor& grad, const char* op) {
  TORCH_CHECK(!(at::GradMode::is_enabled() && grad.requires_grad()),
              fmt::format("{}: double backward (create_graph=True) is not supported for quantized "
                          "weights",
                          op));
}

/// The node that the engine evaluates in this thread. Null for one called by hand: it is not that.
template <typename Function>
torch::autograd::Node* evaluated_node(torch::autograd::AutogradContext* ctx) {
  const auto evaluated = torch::autograd::get_current_node();
  auto* node = dynamic_cast<torch::autograd::CppNode<Function>*>(evaluated.get());
  return node != nullptr && &node->ctx_ == ctx ? node : nullptr;
}

inline Tensor bias_gradient(const Tensor& grad, at::ScalarType dtype) {
  const auto features = grad.sym_size(-1);
  const auto rows = c10::multiply_integers(grad.sym_sizes().slice(0, grad.dim() - 1));
  return grad.reshape_symint({rows, features}).sum(0).to(dtype);
}

/// Whether a size is no symbol whose value is open.
inline bool is_known(const c10::SymInt& size) { return !size.is_symbolic() || size.maybe_as_int(); }

/// A gradient on its way into a linear's backward: values, or codes by rows and by columns.
struct LinearGrad {
  const Tensor& rows;  // or values
  OptionalTensor columns = {};
  at::OptionalIntArrayRef size = {};  // sizes of the gradient that the codes stand for
  std::optional<at::ScalarType> dtype = {};
  OptionalTensor scale = {};  // float32 (1,), what those values are multiplied by
};

/// Calls qshard::linear_backward: (grad_input, grad_weight), (0,) or undefined what is not asked
/// for or was added to `into.leaf.sum`. `added`: an earlier grad_input, which nothing else refers
/// to, to add this one to; it must be needed. `offs`: of experts.
std::tuple<Tensor, Tensor> linear_gradients(const GradSink& into, const LinearGrad& grad,
                                            const RestoredWeight& weight, const Tensor& input,
                                            bool input_is_quantized, bool needs_input,
                                            bool needs_weight, bool weight_only,
                                            const Tensor& added = {},
                                            const OptionalTensor& offs = {});

/// How a linear treats its input, decided from sizes, device and the format that the caller names:
/// a traced call must decide as the real one does.
struct InputUse {
  bool saves_codes = false;       // for wgrad
  bool quantizes_apart = false;   // by an operator of its own
  bool multiplies_codes = false;  // known only where it quantizes apart

  InputUse() = default;  // it is multiplied and kept as it is
  InputUse(const Tensor& input, const Tensor& weight, LinearNeeds needs, bool weight_only,
           std::optional<c10::string_view> format_name, bool input_is_kept = false) {
    if (weight_only || !input.is_cuda() || input.dim() == 0 || has_key(input)) return;
    for (const auto& size : {input.sym_numel(), weight.sym_size(0), weight.sym_size(1)}) {
      if (!is_known(size)) return;
    }
    const int64_t k = input.size(-1);
    if (k == 0) return;
    const int64_t m = leading_numel(input);
    const int64_t n = weight.size(0);
    // An input without a gradient is kept as it is: linears share it, and would not its codes
    // (ops/linear/recorded_activation.h). Where backward would not make the codes that are saved
    // here, it would compute another gradient.
    const Format* known = has_key(weight) ? buffer_of(weight).layout().format
                          : format_name   ? &checked_format(*format_name, "qshard::linear")
                                          : nullptr;
    const auto dtype = input.scalar_type();
    const bool makes_codes_later =
        known && gradient_quantizes_input(*known, input.device(), dtype, m, n, k);
    const bool must_be_plain =
        known && gradient_reads_plain_input(*known, input.device(), dtype, m, n, k);
    saves_codes = !input_is_kept && needs.reads_input() && !must_be_plain &&
                  (needs.input || !makes_codes_later) &&
                  can_save_quantized_input(input.device(), m, n, k);
    if (!format_name || !input.key_set().has(c10::DispatchKey::Python)) return;
    const Format& format = checked_format(*format_name, "qshard::linear");
    if (format.amax_history.length > 0) return;  // each weight scales its input by its own history
    multiplies_codes = multiplies_input_codes(format, input.device(), dtype, m, n, k);
    quantizes_apart = saves_codes || multiplies_codes;
  }
};

}  // namespace qshard
