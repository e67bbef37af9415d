// Nested tensors beside quantized ones, which have this key: the quantized ones take part by their
// values, or by those of their codes where a linear's weight is read (dispatch/aten/matmul.h).
#include <torch/library.h>

#include "dispatch/aten/fallback.h"
#include "dispatch/aten/registration.h"

namespace qshard {
namespace {

/// Every operator that has a kernel for another backend's nested tensors.
void register_nested(torch::Library& aten) {
  for_each_tensor_op("aten", [&](const c10::OperatorHandle& op, const std::string& name) {
    if (name == "linear") return;  // ops/linear/nested_linear.cpp
    const bool takes_others = op.schema().arguments().size() >= 2;
    if (!takes_others || !op.hasKernelForDispatchKey(c10::DispatchKey::NestedTensorCPU)) return;
    aten.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse3, m) {
  if (key_is_ours()) register_nested(m);
}

}  // namespace qshard
