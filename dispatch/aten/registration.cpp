#include "dispatch/aten/registration.h"

#include <fmt/format.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

#include "dispatch/aten/fallback.h"
#include "dispatch/aten/native_kernels.h"
#include "dispatch/tensor/quantized_tensor_impl.h"

namespace qshard {

OpTraits OpTraits::of(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  OpTraits traits;
  traits.changes_metadata =
      op.hasTag(at::Tag::inplace_view) || schema.name() == "aten::shallow_copy_data_";
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    traits.returns_view |= alias != nullptr && !alias->isWrite();
  }
  for (const auto& argument : schema.arguments()) {
    traits.takes_tensor |= argument.type()->str().find("Tensor") != std::string::npos;
  }
  return traits;
}

std::string op_name(const c10::OperatorHandle& op) { return c10::toString(op.operator_name()); }

constexpr auto kAutogradKey = c10::DispatchKey::AutogradPrivateUse3;

namespace {

constexpr auto kBoxedFallback = [] {
  return torch::CppFunction::makeFromBoxedFunction<&fallback>();
};
constexpr auto kBoxedView = [] {
  return torch::CppFunction::makeFromBoxedFunction<&view_kernel>();
};
constexpr auto kBoxedInplaceView = [] {
  return torch::CppFunction::makeFromBoxedFunction<&inplace_view_kernel>();
};

/// Private-use keys are first come, first served (c10/core/DispatchKey.h, "Note [Private use
/// DispatchKey]"; pytorch#74763).
std::string find_foreign_owner() {
  auto& dispatcher = c10::Dispatcher::singleton();
  constexpr std::array kOurKeys{kKey, kAutogradKey};
  for (const auto key : kOurKeys) {
    if (dispatcher.hasBackendFallbackForDispatchKey(key)) {
      return fmt::format("a backend fallback on {}", c10::toString(key));
    }
  }
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    for (const auto key : kOurKeys) {
      if (op && op->hasKernelForDispatchKey(key)) {
        return fmt::format("a kernel of {} on {}", c10::toString(name), c10::toString(key));
      }
    }
  }
  return "";
}

/// Ops that keep their CompositeImplicit decomposition, so that DTensor sees their parts.
bool decomposes(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

bool is_composite_explicit(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

/// Composite out= ops resize `out` below the dispatcher (at::native::resize_output), which on our
/// tensors changes the shape and the packed storage under it. They run on plain stand-ins instead.
bool writes_out(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const c10::Argument& argument) { return argument.is_out(); });
}

void composite_out_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                          torch::jit::Stack* stack) {
  // As the parts of the op would have said; the fallback is below autograd and would not.
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    TORCH_CHECK(
        !(value.isTensor() && value.toTensor().requires_grad() && at::GradMode::is_enabled()),
        fmt::format("{}: functions with out=... arguments don't support automatic "
                    "differentiation, but one of the arguments requires grad",
                    op_name(op)));
  }
  fallback(op, keys, stack);
}

/// Composite kernels that read memory themselves (quantile since torch 2.15), or save a scratch
/// buffer made by empty_like (rrelu), run on the values. `* 1` keeps the bits and lets the gradient
/// through: this is still above autograd.
void composite_on_values_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet,
                                torch::jit::Stack* stack) {
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor() && has_key(value.toTensor())) value = value.toTensor().mul(1);
  }
  op.callBoxed(stack);
}

bool runs_on_values(const std::string& name) {
  constexpr std::array kNames{"aten::max_pool1d", "aten::quantile", "aten::nanquantile",
                              "aten::rrelu"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

/// In-place view ops whose new shape needs other bytes than the tensor has: named errors.
bool needs_other_storage(const std::string& name) {
  for (const char* prefix : {"resize", "set_", "_resize", "sparse_", "rename"}) {
    if (name.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

constexpr auto kBoxedCompositeOut = [] {
  return torch::CppFunction::makeFromBoxedFunction<&composite_out_kernel>();
};

constexpr auto kBoxedCompositeOnValues = [] {
  return torch::CppFunction::makeFromBoxedFunction<&composite_on_values_kernel>();
};

/// Every aten op that would otherwise run a composite kernel on raw storage, and every view op.
void register_remaining(torch::Library& aten) {
  for_each_tensor_op("aten", [&](const c10::OperatorHandle& op, const std::string& name) {
    if (op.hasKernelForDispatchKey(kKey)) return;
    if (decomposes(op)) {
      if (writes_out(op)) {
        aten.impl(name.c_str(), kBoxedCompositeOut());
      } else if (runs_on_values(op.operator_name().name)) {
        aten.impl(name.c_str(), kBoxedCompositeOnValues());
      }
    } else if (op.hasTag(at::Tag::inplace_view) && !needs_other_storage(name)) {
      aten.impl(name.c_str(), kBoxedInplaceView());
    } else if (OpTraits::of(op).returns_view) {
      aten.impl(name.c_str(), kBoxedView());
    } else if (is_composite_explicit(op)) {
      aten.impl(name.c_str(), kBoxedFallback());
    }
  });
}

/// Every op that has a kernel for the sparse tensors of another backend: some have composite ones,
/// too, which come before a fallback and expect strided tensors.
void register_sparse(torch::Library& aten, c10::DispatchKey of_cpu) {
  for_each_tensor_op("aten", [&](const c10::OperatorHandle& op, const std::string& name) {
    if (!op.hasKernelForDispatchKey(of_cpu) || op.schema().arguments().size() < 2) return;
    // It asks its arguments whether they require a gradient, and their values do not.
    if (name.rfind("_sparse_mm_reduce_impl", 0) == 0) return;
    aten.impl(name.c_str(), kBoxedFallback());
  });
}

}  // namespace

void for_each_tensor_op(
    const std::string& name_space,
    const std::function<void(const c10::OperatorHandle& op, const std::string& name)>& visit) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::string prefix = name_space + "::";
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind(prefix, 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !OpTraits::of(*op).takes_tensor) continue;
    visit(*op, op_name(*op).substr(prefix.size()));
  }
}

const std::string& foreign_owner_of_key() {
  static const std::string owner = find_foreign_owner();
  return owner;
}

void check_key_is_ours(const char* op) {
  TORCH_CHECK(key_is_ours(),
              fmt::format("{}: the dispatch key {} is already in use by another library in this "
                          "process ({}); quantized tensors do not work beside it. Load qshard in a "
                          "process without that library",
                          op, c10::toString(kKey), foreign_owner_of_key()));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse3, aten) {
  if (!key_is_ours()) {
    TORCH_WARN(fmt::format(
        "qshard: the dispatch key {} is already in use by another library in this process ({}); "
        "quantized tensors will not work, and nothing is installed",
        c10::toString(kKey), foreign_owner_of_key()));
    return;
  }
  register_views(aten);
  register_factories(aten);
  register_copies(aten);
  register_indexing(aten);
  register_matmul(aten);
  register_optimizers(aten);
  register_remaining(aten);
}

TORCH_LIBRARY_IMPL(_, PrivateUse3, m) {
  if (key_is_ours()) m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// A sparse tensor beside a quantized one has these keys: quantized ones take part by their values.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse3, m) {
  if (key_is_ours()) register_sparse(m, c10::DispatchKey::SparseCPU);
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse3, m) {
  if (key_is_ours()) register_sparse(m, c10::DispatchKey::SparseCsrCPU);
}

// Core registers this fallthrough for its own backends only (VariableFallbackKernel.cpp).
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse3, m) {
  if (key_is_ours()) m.fallback(torch::CppFunction::makeFallthrough());
}

// For any backend it has a formula in torch operators, CompositeExplicitAutograd, which comes
// before a fallback; that rounds in another order than its CUDA kernel, which runs on the values.
TORCH_LIBRARY_IMPL(bitsandbytes, PrivateUse3, m) {
  if (key_is_ours()) m.impl("optimizer_update_32bit", kBoxedFallback());
}

TORCH_LIBRARY_IMPL(c10d, PrivateUse3, m) {
  if (key_is_ours()) register_collectives(m, "c10d");
}

TORCH_LIBRARY_IMPL(c10d, BackendSelect, m) {
  if (key_is_ours()) register_collectives_of_any(m);
}

TORCH_LIBRARY_IMPL(_c10d_functional, PrivateUse3, m) {
  if (key_is_ours()) register_collectives(m, "_c10d_functional");
}

TORCH_LIBRARY_IMPL(_c10d_functional_autograd, PrivateUse3, m) {
  if (key_is_ours()) register_collectives(m, "_c10d_functional_autograd");
}

TORCH_LIBRARY_IMPL(_dtensor, PrivateUse3, m) {
  if (key_is_ours()) register_collectives(m, "_dtensor");
}

}  // namespace qshard
